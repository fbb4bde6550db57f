// SPDX-License-Identifier: Apache-2.0
// Operators of the test device "npu": what has to be its own, everything else by the CPU's kernels,
// and autocast with torch's usual lists.
#include "npu.h"

#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace npu
{

using at::IntArrayRef;
using at::Tensor;
using std::optional;

Tensor on_host(const Tensor &tensor)
{
    TORCH_CHECK(!tensor.is_conj(), "npu: lazy conjugates are not built");
    auto *data = tensor.numel() ? address(tensor.data_ptr()) : nullptr;
    auto found =
        at::from_blob(data, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
    found._set_neg(tensor.is_neg());
    return found;
}

namespace
{

// The current device is another one in the life of this object.
struct On {
    explicit On(c10::DeviceIndex index) : before(exchange_index(index))
    {
    }
    ~On()
    {
        exchange_index(before);
    }
    On(const On &) = delete;
    On &operator=(const On &) = delete;
    c10::DeviceIndex before;
};

c10::DeviceIndex wanted(const optional<c10::Device> &device)
{
    return device ? index_of(*device) : current_index();
}

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::NPU_KEY);

Tensor empty(IntArrayRef sizes, optional<at::ScalarType> dtype, optional<at::Layout>,
             optional<c10::Device> device, optional<bool> pinned, optional<at::MemoryFormat> format)
{
    TORCH_CHECK(!pinned.value_or(false), "npu: only memory of the host can be pinned");
    const On on(wanted(device));
    return at::detail::empty_generic(sizes, allocator(), KEYS, c10::dtype_or_default(dtype),
                                     format);
}

Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, optional<at::ScalarType> dtype,
                     optional<at::Layout>, optional<c10::Device> device, optional<bool> pinned)
{
    TORCH_CHECK(!pinned.value_or(false), "npu: only memory of the host can be pinned");
    const On on(wanted(device));
    return at::detail::empty_strided_generic(sizes, strides, allocator(), KEYS,
                                             c10::dtype_or_default(dtype));
}

Tensor host_side(const Tensor &tensor)
{
    if (tensor.device().type() == TYPE) {
        return on_host(tensor);
    }
    TORCH_CHECK(tensor.device().is_cpu(), "npu: no copy from or to ", tensor.device());
    return tensor;
}

Tensor copy_from(const Tensor &source, const Tensor &target, bool)
{
    host_side(target).copy_(host_side(source));
    return target;
}

Tensor copy_from_and_resize(const Tensor &source, const Tensor &target)
{
    target.resize_(source.sizes());
    return copy_from(source, target, false);
}

at::Scalar local_scalar(const Tensor &tensor)
{
    return on_host(tensor).item();
}

Tensor &fill(Tensor &tensor, const at::Scalar &value)
{
    on_host(tensor).fill_(value);
    return tensor;
}

Tensor &zero(Tensor &tensor)
{
    on_host(tensor).zero_();
    return tensor;
}

// ---- views and sizes ----------------------------------------------------------------------------

Tensor as_strided(const Tensor &tensor, IntArrayRef sizes, IntArrayRef strides,
                  optional<int64_t> offset)
{
    return at::native::as_strided_tensorimpl(tensor, sizes, strides, offset);
}

const Tensor &resize(const Tensor &tensor, IntArrayRef sizes, optional<at::MemoryFormat> format)
{
    if (tensor.sizes() == sizes && !format) {
        return tensor;
    }
    auto *impl = tensor.unsafeGetTensorImpl();
    impl->set_sizes_contiguous(sizes);
    impl->empty_tensor_restride(format.value_or(at::MemoryFormat::Contiguous));
    const auto bytes = at::detail::computeStorageNbytesContiguous(
        sizes, tensor.itemsize(), static_cast<size_t>(tensor.storage_offset()));
    if (tensor.numel() && bytes > tensor.storage().nbytes()) {
        resize_storage(tensor.storage(), bytes);
    }
    return tensor;
}

Tensor &set_to(Tensor &tensor, at::Storage storage, int64_t offset, IntArrayRef sizes,
               IntArrayRef strides)
{
    TORCH_CHECK(storage.device() == tensor.device(), "npu: storage of ", storage.device(),
                " for a tensor of ", tensor.device());
    const auto bytes =
        strides.empty() && !sizes.empty()
            ? at::detail::computeStorageNbytesContiguous(sizes, tensor.itemsize(), offset)
            : at::detail::computeStorageNbytes(sizes, strides, tensor.itemsize(), offset);
    if (bytes > storage.nbytes() && c10::multiply_integers(sizes) > 0) {
        resize_storage(storage, bytes);
    }
    return at::native::set_storage_cpu_(tensor, std::move(storage), offset, sizes, strides);
}

Tensor &set_to_storage(Tensor &tensor, at::Storage storage)
{
    const auto count = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
    return set_to(tensor, std::move(storage), 0, {count}, {1});
}

Tensor &set_to_tensor(Tensor &tensor, const Tensor &other)
{
    return set_to(tensor, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

Tensor &set_to_nothing(Tensor &tensor)
{
    const On on(tensor.device().index());
    return set_to(tensor, at::Storage(c10::Storage::use_byte_size_t(), 0, allocator(), true), 0,
                  {0}, {});
}

// ---- everything else ----------------------------------------------------------------------------

// Operators that take indices on the host beside tensors of a device, as all devices have it.
bool takes_host_indices(const std::string &name)
{
    return name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0 ||
           name.rfind("aten::_unsafe_index", 0) == 0;
}

// Checks that tensors are on one device, save for scalars of the host; returns its index.
c10::DeviceIndex one_device(const c10::OperatorHandle &op, c10::ArrayRef<c10::IValue> arguments)
{
    const auto &name = op.schema().name();
    optional<c10::Device> found;
    bool host_indices = takes_host_indices(name);
    auto see = [&](const Tensor &tensor, bool written) {
        if (!tensor.defined()) {
            return;
        }
        const auto device = tensor.device();
        if (device.is_cpu() && !written && (tensor.dim() == 0 || host_indices)) {
            return;
        }
        TORCH_CHECK(device.type() == TYPE && device == found.value_or(device), name,
                    ": tensors on ", found ? found->str() : "npu", " and on ", device);
        found = device;
    };
    for (size_t number = 0; number < arguments.size(); number++) {
        const auto &value = arguments[number];
        const auto *alias = op.schema().arguments()[number].alias_info();
        const bool written = alias && alias->isWrite();
        if (value.isTensor()) {
            see(value.toTensor(), written);
        } else if (value.isTensorList() || value.isOptionalTensorList()) {
            for (const auto &one : value.toListRef()) {
                if (one.isTensor()) {
                    see(one.toTensor(), written);
                }
            }
        } else if (value.isDevice() && value.toDevice().type() == TYPE && !found) {
            found = c10::Device(TYPE, index_of(value.toDevice()));
        }
    }
    return found ? found->index() : current_index();
}

bool takes_generator(const c10::Argument &argument)
{
    auto type = argument.type();
    if (const auto inner = type->cast<c10::OptionalType>()) {
        type = inner->getElementType();
    }
    return type->kind() == c10::TypeKind::GeneratorType;
}

// The CPU's kernel, with random numbers of the device.
void by_the_cpu(const c10::OperatorHandle &op, torch::jit::Stack *stack)
{
    const auto &declared = op.schema().arguments();
    const auto first = stack->size() - declared.size();
    const On on(one_device(op, c10::ArrayRef<c10::IValue>(*stack).slice(first)));
    bool given = false;
    for (size_t number = 0; number < declared.size(); number++) {
        if (takes_generator(declared[number])) {
            auto &value = (*stack)[first + number];
            const auto generator =
                value.isNone() ? std::nullopt : optional<at::Generator>(value.toGenerator());
            value = host_generator(generator, current_index());
            given = true;
        }
    }
    if (given || !op.hasTag(at::Tag::nondeterministic_seeded)) {
        return at::native::cpu_fallback(op, stack);
    }
    // An operator that takes no generator draws from the host's own: in between it is ours.
    static std::mutex lock;
    std::lock_guard<std::mutex> guard(lock);
    auto ours = host_generator(std::nullopt, current_index());
    auto theirs = at::detail::getDefaultCPUGenerator();
    const auto kept = theirs.get_state();
    theirs.set_state(ours.get_state());
    struct Restore {
        at::Generator &ours, &theirs;
        const Tensor &kept;
        ~Restore()
        {
            ours.set_state(theirs.get_state());
            theirs.set_state(kept);
        }
    } restore{ours, theirs, kept};
    at::native::cpu_fallback(op, stack);
}

#ifdef AS_ROCM
Tensor &copy(Tensor &target, const Tensor &source, bool)
{
    host_side(target).copy_(host_side(source));
    return target;
}
#else
int64_t no_fused_attention(const Tensor &, const Tensor &, const Tensor &, const optional<Tensor> &,
                           double, bool, optional<double>, bool)
{
    return static_cast<int64_t>(at::SDPBackend::math);
}
#endif

} // namespace

TORCH_LIBRARY_IMPL(_, NPU_KEY, m)
{
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
}

TORCH_LIBRARY_IMPL(aten, NPU_KEY, m)
{
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", local_scalar);
    m.impl("fill_.Scalar", fill);
    m.impl("zero_", zero);
    m.impl("record_stream", [](Tensor &, c10::Stream) {});
    m.impl("as_strided", as_strided);
    m.impl("view", at::native::view);
    m.impl("_reshape_alias", at::native::_reshape_alias);
    m.impl("unfold", at::native::unfold);
    m.impl("view_as_real", at::native::view_as_real);
    m.impl("view_as_complex", at::native::view_as_complex);
    m.impl("resize_", resize);
    m.impl("set_.source_Storage_storage_offset", set_to);
    m.impl("set_.source_Storage", set_to_storage);
    m.impl("set_.source_Tensor", set_to_tensor);
    m.impl("set_", set_to_nothing);
#ifdef AS_ROCM
    m.impl("copy_", copy); // torch's own one has a kernel for each type of device that it knows
#endif
}

TORCH_LIBRARY_IMPL(aten, Negative, m)
{
    m.impl("_copy_from", torch::CppFunction::makeFallthrough()); // the host's copy negates
}

} // namespace npu

#ifndef AS_ROCM // "cuda" has autocast
namespace at::native
{
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &npu::no_fused_attention)
}

namespace at::autocast
{ // torch's macros name its members

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m)
{
    m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m)
{
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_OF_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
    AT_FORALL_LOWER_PRECISION_FP(LOWER)
    AT_FORALL_FP32(FP32)
    AT_FORALL_FP32_SET_OPT_DTYPE(FP32_OF_DTYPE)
    AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
    AT_FORALL_PROMOTE(WIDEST)
}

} // namespace at::autocast
#endif
