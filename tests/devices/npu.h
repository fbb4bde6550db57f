// SPDX-License-Identifier: Apache-2.0
// What the files of the test device "npu" share. With AS_ROCM they make a stand-in for AMD's GPUs
// instead (rocm_device.cpp), in a build of torch for the CPU alone: "cuda" has no device there.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

namespace npu
{

#ifdef AS_ROCM
#define NPU_KEY CUDA
constexpr auto TYPE = c10::DeviceType::CUDA;
#else
#define NPU_KEY PrivateUse1
constexpr auto TYPE = c10::DeviceType::PrivateUse1;
#endif
constexpr c10::DeviceIndex COUNT = 2;

// A pointer of the device is an address of the host under a tag that no address has, in bits 52 to
// 55, so that x86 and Arm both refuse it: whatever reads it, but for the device's own kernels, ends
// the process. The tag has bit 54, and below it the index: a pointer says whose memory it is.
constexpr int TAG_AT = 52;
constexpr uintptr_t TAG = 4;

inline void *tagged(void *block, c10::DeviceIndex index)
{
    const auto tag = (TAG | static_cast<uintptr_t>(index)) << TAG_AT;
    return reinterpret_cast<void *>(reinterpret_cast<uintptr_t>(block) | tag);
}

inline void *address(const void *pointer)
{
    constexpr auto mask = (uintptr_t(1) << TAG_AT) - 1;
    return reinterpret_cast<void *>(reinterpret_cast<uintptr_t>(pointer) & mask);
}

// The device of a pointer; none where it is one of the host.
inline c10::Device device_of(const void *pointer)
{
    const auto tag = reinterpret_cast<uintptr_t>(pointer) >> TAG_AT;
    return tag & TAG ? c10::Device(TYPE, tag & (TAG - 1)) : c10::Device(c10::DeviceType::CPU);
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
