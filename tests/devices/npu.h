// SPDX-License-Identifier: Apache-2.0
// What the files of the test device "npu" share.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

namespace npu {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex COUNT = 2;

// A pointer of the device is an address of the host under a tag that no address has: bit 62, and
// the index from bit 56 on. So a read by anything else than the device's own kernels ends the
// process, and a pointer says whose memory it is.
inline void *address(const void *pointer) {
    return reinterpret_cast<void *>(reinterpret_cast<uintptr_t>(pointer) & 0x00ffffffffffffff);
}

// The device of a pointer; none where it is one of the host.
inline c10::Device device_of(const void *pointer) {
    const auto tag = reinterpret_cast<uintptr_t>(pointer) >> 56;
    return tag & 0x40 ? c10::Device(TYPE, tag & 0x3f) : c10::Device(c10::DeviceType::CPU);
}

c10::Allocator *allocator();
// The current device of this thread, and another that a caller has to set back.
c10::DeviceIndex current_index();
c10::DeviceIndex exchange_index(c10::DeviceIndex index);
// Index of a device as a caller names it: the current one where it has none. c10::Error: no such.
c10::DeviceIndex index_of(c10::Device device);
// Gives storage another size, and keeps what fits.
void resize_storage(const c10::Storage &storage, size_t bytes);
// The generator of the host that draws the numbers of one of the device; that of the device itself
// where none is given. c10::Error: it is of another device.
at::Generator host_generator(const std::optional<at::Generator> &given, c10::DeviceIndex index);
// A tensor of the host on the memory of one of the device.
at::Tensor on_host(const at::Tensor &tensor);

} // namespace npu
