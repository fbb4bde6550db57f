// SPDX-License-Identifier: Apache-2.0
// The test device "npu" as torch sees a device: memory, streams, events, random numbers.
//
// Its memory is that of the host under pointers that the host can not read (npu.h), and its kernels
// are those of the CPU. They have run when a call returns, so streams only have names, and an event
// is over when it is recorded.
#include "npu.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace npu
{
namespace
{

constexpr size_t ALIGNMENT = 256;
constexpr size_t MEMORY = size_t(1) << 34; // what the device says that it has
thread_local c10::DeviceIndex current = 0;
thread_local std::array<c10::StreamId, COUNT> current_stream = {};
std::atomic<c10::StreamId> streams = 0;

c10::DeviceIndex checked(int64_t index)
{
    TORCH_CHECK(index >= 0 && index < COUNT, "npu: no device ", index, ", there are ", int(COUNT));
    return static_cast<c10::DeviceIndex>(index);
}

// ---- memory -------------------------------------------------------------------------------------

struct Block {
    size_t bytes;
    bool pinned;
};

// Blocks in use by their addresses, and what the devices' count.
struct Memory {
    std::mutex lock;
    std::unordered_map<void *, Block> blocks;
    std::array<c10::CachingDeviceAllocator::DeviceStats, COUNT> stats;

    void *take(size_t bytes, bool pinned)
    {
        void *found =
            std::aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
        TORCH_CHECK(found, "npu: no memory for ", bytes, " bytes");
        std::lock_guard<std::mutex> guard(lock);
        blocks[found] = {bytes, pinned};
        return found;
    }

    size_t give_back(void *block)
    {
        std::lock_guard<std::mutex> guard(lock);
        const auto bytes = blocks.at(block).bytes;
        blocks.erase(block);
        std::free(block);
        return bytes;
    }
};

Memory &memory()
{
    static auto *made = new Memory(); // outlives every tensor
    return *made;
}

void count(c10::DeviceIndex index, int64_t bytes)
{
    using c10::CachingAllocator::StatType;
    std::lock_guard<std::mutex> guard(memory().lock);
    auto &stats = memory().stats[index];
    auto add = [](auto &all, int64_t amount) {
        auto &one = all[static_cast<size_t>(StatType::AGGREGATE)];
        amount > 0 ? one.increase(amount) : one.decrease(-amount);
    };
    add(stats.allocation, bytes > 0 ? 1 : -1);
    for (auto *all : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
        add(*all, bytes);
    }
}

void give_back(void *pointer)
{
    count(device_of(pointer).index(), -static_cast<int64_t>(memory().give_back(address(pointer))));
}

void give_back_pinned(void *block)
{
    memory().give_back(block);
}

struct Allocator final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t bytes) override
    {
        const c10::Device device(TYPE, current);
        if (bytes == 0) {
            return {nullptr, device};
        }
        auto *pointer = tagged(memory().take(bytes, false), current);
        count(current, static_cast<int64_t>(bytes));
        return {pointer, pointer, &give_back, device};
    }
    c10::DeleterFnPtr raw_deleter() const override
    {
        return &give_back;
    }
    void copy_data(void *to, const void *from, std::size_t bytes) const override
    {
        std::memcpy(address(to), address(from), bytes);
    }
    bool initialized() override
    {
        return true;
    }
    void emptyCache(c10::MempoolId_t) override
    {
    }
    void recordStream(const c10::DataPtr &, c10::Stream) override
    {
    }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override
    {
        std::lock_guard<std::mutex> guard(memory().lock);
        return memory().stats[checked(index)];
    }
    template <typename Reset> void reset(c10::DeviceIndex index, Reset reset_one)
    {
        std::lock_guard<std::mutex> guard(memory().lock);
        auto &stats = memory().stats[checked(index)];
        for (auto *all : {&stats.allocation, &stats.allocated_bytes, &stats.reserved_bytes,
                          &stats.active_bytes}) {
            for (auto &one : *all) {
                reset_one(one);
            }
        }
    }
    void resetAccumulatedStats(c10::DeviceIndex index) override
    {
        reset(index, [](auto &one) { one.reset_accumulated(); });
    }
    void resetPeakStats(c10::DeviceIndex index) override
    {
        reset(index, [](auto &one) { one.reset_peak(); });
    }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override
    {
        const auto used = getDeviceStats(index).allocated_bytes[0].current;
        return {MEMORY - static_cast<size_t>(used), MEMORY};
    }
};

// Memory of the host that the device would copy from directly.
struct PinnedAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override
    {
        void *block = bytes ? memory().take(bytes, true) : nullptr;
        return {block, block, bytes ? &give_back_pinned : nullptr, c10::DeviceType::CPU};
    }
    c10::DeleterFnPtr raw_deleter() const override
    {
        return &give_back_pinned;
    }
    void copy_data(void *to, const void *from, std::size_t bytes) const override
    {
        std::memcpy(to, from, bytes);
    }
};

Allocator device_allocator;
PinnedAllocator pinned_allocator;
c10::AllocatorRegisterer<TYPE> registered_allocator(&device_allocator);

// ---- the current device, streams, events --------------------------------------------------------

struct Event {
    c10::DeviceIndex index;
    std::chrono::steady_clock::time_point time;
};

c10::Stream stream(c10::DeviceIndex index, c10::StreamId id)
{
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, index), id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override
    {
        return TYPE;
    }
    c10::Device exchangeDevice(c10::Device device) const override
    {
        return {TYPE, exchange_index(device.index())};
    }
    c10::Device getDevice() const override
    {
        return {TYPE, current};
    }
    void setDevice(c10::Device device) const override
    {
        current = checked(device.index());
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override
    {
        if (device.index() >= 0 && device.index() < COUNT) {
            current = device.index();
        }
    }
    c10::DeviceIndex deviceCount() const noexcept override
    {
        return COUNT;
    }
    void synchronizeDevice(const c10::DeviceIndex index) const override
    {
        checked(index);
    }

    c10::Stream getStream(c10::Device device) const override
    {
        const auto index = index_of(device);
        return stream(index, current_stream[index]);
    }
    c10::Stream getDefaultStream(c10::Device device) const override
    {
        return stream(index_of(device), 0);
    }
    c10::Stream getNewStream(c10::Device device, int) const override
    {
        return stream(index_of(device), ++streams);
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override
    {
        return getNewStream(device, 0);
    }
    c10::Stream exchangeStream(c10::Stream stream) const override
    {
        const auto before = getStream(stream.device());
        current_stream[stream.device_index()] = stream.id();
        return before;
    }
    void *getStreamNativeHandle(const c10::Stream stream) const override
    {
        return reinterpret_cast<void *>(stream.id());
    }
    bool queryStream(const c10::Stream &) const override
    {
        return true;
    }
    void synchronizeStream(const c10::Stream &) const override
    {
    }
    void recordDataPtrOnStream(const c10::DataPtr &, const c10::Stream &) const override
    {
    }

    void record(void **event, const c10::Stream &stream, const c10::DeviceIndex index,
                const c10::EventFlag) const override
    {
        TORCH_CHECK(index < 0 || index == stream.device_index(), "npu: event of device ",
                    int(index), " on a stream of device ", int(stream.device_index()));
        if (*event == nullptr) {
            *event = new Event();
        }
        *static_cast<Event *>(*event) = {stream.device_index(), std::chrono::steady_clock::now()};
    }
    void block(void *, const c10::Stream &) const override
    {
    }
    bool queryEvent(void *) const override
    {
        return true;
    }
    void synchronizeEvent(void *) const override
    {
    }
    void destroyEvent(void *event, const c10::DeviceIndex) const noexcept override
    {
        delete static_cast<Event *>(event);
    }
    double elapsedTime(void *first, void *second, const c10::DeviceIndex) const override
    {
        const auto time = static_cast<Event *>(second)->time - static_cast<Event *>(first)->time;
        return std::chrono::duration<double, std::milli>(time).count();
    }
};
c10::impl::DeviceGuardImplRegistrar registered_guard(TYPE, new Guard());

// ---- random numbers -----------------------------------------------------------------------------

// A generator of the device: one of the host draws its numbers.
struct Generator final : c10::GeneratorImpl {
    Generator(c10::DeviceIndex index, at::Generator host)
        : GeneratorImpl({TYPE, index}, c10::DispatchKeySet(c10::DispatchKey::NPU_KEY)),
          host_(std::move(host))
    {
    }
    void set_current_seed(uint64_t seed) override
    {
        host_.set_current_seed(seed);
    }
    void set_offset(uint64_t offset) override
    {
        host_.set_offset(offset);
    }
    uint64_t get_offset() const override
    {
        return host_.get_offset();
    }
    uint64_t current_seed() const override
    {
        return host_.current_seed();
    }
    uint64_t seed() override
    {
        return host_.seed();
    }
    void set_state(const c10::TensorImpl &state) override
    {
        impl()->set_state(state);
    }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override
    {
        return impl()->get_state();
    }
    const at::Generator &host() const
    {
        return host_;
    }

  private:
    c10::GeneratorImpl *impl() const
    {
        return host_.unsafeGetGeneratorImpl();
    }
    Generator *clone_impl() const override
    {
        return new Generator(device_.index(), host_.clone());
    }
    at::Generator host_;
};

at::Generator new_generator(c10::DeviceIndex index)
{
    return at::make_generator<Generator>(index, at::detail::createCPUGenerator());
}

const at::Generator &default_generator(c10::DeviceIndex index)
{
    static auto *made = new std::array<at::Generator, COUNT>{new_generator(0), new_generator(1)};
    return (*made)[index];
}

// What torch asks of a type of devices, whatever the interface.
template <class Interface> struct DeviceHooks : Interface {
    bool isBuilt() const override
    {
        return true;
    }
    bool isAvailable() const override
    {
        return true;
    }
    bool hasPrimaryContext(c10::DeviceIndex) const override
    {
        return true;
    }
    c10::DeviceIndex deviceCount() const override
    {
        return COUNT;
    }
    c10::DeviceIndex getCurrentDevice() const override
    {
        return current;
    }
    void setCurrentDevice(c10::DeviceIndex index) const override
    {
        current = checked(index);
    }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override
    {
        return exchange_index(index);
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override
    {
        return exchange_index(index < 0 ? current : index);
    }
    const at::Generator &getDefaultGenerator(c10::DeviceIndex index) const override
    {
        return default_generator(index_of({TYPE, index}));
    }
    at::Generator getNewGenerator(c10::DeviceIndex index) const override
    {
        return new_generator(index_of({TYPE, index}));
    }
};

#ifndef AS_ROCM
struct Hooks final : DeviceHooks<at::PrivateUse1HooksInterface> {
    c10::Device getDeviceFromPtr(void *pointer) const override
    {
        const auto device = device_of(pointer);
        TORCH_CHECK(device.type() == TYPE, "npu: a pointer of the host");
        return device;
    }
    bool isPinnedPtr(const void *pointer) const override
    {
        std::lock_guard<std::mutex> guard(memory().lock);
        const auto found = memory().blocks.find(const_cast<void *>(pointer));
        return found != memory().blocks.end() && found->second.pinned;
    }
    c10::Allocator *getPinnedMemoryAllocator() const override
    {
        return &pinned_allocator;
    }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override
    {
        resize_storage(storage, bytes);
    }
};
#endif

} // namespace

c10::Allocator *allocator()
{
    return &device_allocator;
}
c10::DeviceIndex current_index()
{
    return current;
}

c10::DeviceIndex exchange_index(c10::DeviceIndex index)
{
    const auto before = current;
    current = checked(index);
    return before;
}

c10::DeviceIndex index_of(c10::Device device)
{
    TORCH_CHECK(device.type() == TYPE, "npu: a device of another kind: ", device);
    return device.has_index() ? checked(device.index()) : current;
}

void resize_storage(const c10::Storage &storage, size_t bytes)
{
    const auto before = exchange_index(storage.device().index());
    auto made = device_allocator.allocate(bytes);
    exchange_index(before);
    if (const auto kept = std::min(bytes, storage.nbytes())) {
        device_allocator.copy_data(made.get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(made));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

at::Generator host_generator(const std::optional<at::Generator> &given, c10::DeviceIndex index)
{
    const auto &found = given && given->defined() ? *given : default_generator(index);
    TORCH_CHECK(found.device() == c10::Device(TYPE, index), "npu: a generator of ", found.device(),
                " for npu:", int(index));
    return static_cast<Generator *>(found.unsafeGetGeneratorImpl())->host();
}

} // namespace npu

#ifndef AS_ROCM
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    m.def("register_hooks", [] { at::RegisterPrivateUse1HooksInterface(new npu::Hooks()); });
    m.def("device_count", [] { return npu::COUNT; });
    m.def("current_device", [] { return npu::current; });
    m.def("exchange_device",
          [](int64_t index) { return npu::exchange_index(npu::checked(index)); });
    m.def("default_generator",
          [](int64_t index) { return npu::default_generator(npu::checked(index)); });
    m.def("device_index_of", [](uintptr_t pointer) {
        return npu::device_of(reinterpret_cast<void *>(pointer)).index();
    });
}
#endif
