// SPDX-License-Identifier: Apache-2.0
// A stand-in for AMD's GPUs, for a build of torch for the CPU alone: the test device under the name
// "cuda", with all that asks torch for its type, and torch's DLPack exchange table as a build for
// ROCm has it: "cuda" is kDLROCM there.
#define AS_ROCM
#include "npu_device.cpp"
#include "npu_operators.cpp"

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/dlpack.h>

namespace
{

// ---- what torch asks of devices "cuda" ----

struct CUDAHooks final : npu::DeviceHooks<at::CUDAHooksInterface> {
    void init() const override
    {
    }
    bool hasCUDA() const override
    {
        return true;
    }
    bool hasROCM() const override
    {
        return true;
    }
    c10::DeviceIndex current_device() const override
    {
        return npu::current_index();
    }
};

// Torch has made its own object by now, which says that nothing is there: this one takes its place.
void register_hooks()
{
    static_assert(sizeof(CUDAHooks) == sizeof(at::CUDAHooksInterface), "it has no members");
    new (const_cast<at::CUDAHooksInterface *>(&at::detail::getCUDAHooks())) CUDAHooks();
}

// ---- the exchange table ----

const DLPackExchangeAPI *torch_table = nullptr;

void rename(DLDevice &device, DLDeviceType from, DLDeviceType to)
{
    if (device.device_type == from) {
        device.device_type = to;
    }
}

int allocate(DLTensor *prototype, DLManagedTensorVersioned **out, void *context,
             void (*fail)(void *, const char *, const char *))
{
    auto asked = *prototype;
    rename(asked.device, kDLROCM, kDLCUDA);
    const int status = torch_table->managed_tensor_allocator(&asked, out, context, fail);
    if (status == 0) {
        rename((*out)->dl_tensor.device, kDLCUDA, kDLROCM);
    }
    return status;
}

int managed_from(void *object, DLManagedTensorVersioned **out)
{
    const int status = torch_table->managed_tensor_from_py_object_no_sync(object, out);
    if (status == 0) {
        rename((*out)->dl_tensor.device, kDLCUDA, kDLROCM);
    }
    return status;
}

int object_of(DLManagedTensorVersioned *managed, void **out)
{
    rename(managed->dl_tensor.device, kDLROCM, kDLCUDA);
    return torch_table->managed_tensor_to_py_object_no_sync(managed, out);
}

int view_of(void *object, DLTensor *out)
{
    const int status = torch_table->dltensor_from_py_object_no_sync(object, out);
    if (status == 0) {
        rename(out->device, kDLCUDA, kDLROCM);
    }
    return status;
}

int current_stream(DLDeviceType type, int32_t index, void **out)
{
    return torch_table->current_work_stream(type == kDLROCM ? kDLCUDA : type, index, out);
}

pybind11::capsule renamed(const pybind11::capsule &table)
{
    torch_table = static_cast<const DLPackExchangeAPI *>(table.get_pointer());
    static DLPackExchangeAPI made;
    made = {torch_table->header, allocate, managed_from, object_of, view_of, current_stream};
    made.header.prev_api = nullptr;
    return pybind11::capsule(&made, table.name());
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    m.def("register_hooks", &register_hooks);
    m.def("exchange_table", &renamed);
    m.def("device_count", [] { return npu::COUNT; });
    m.def("current_device", [] { return npu::current_index(); });
    m.def("exchange_device", &npu::exchange_index);
    m.def("default_generator", &npu::default_generator);
}
