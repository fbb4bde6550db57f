// SPDX-License-Identifier: Apache-2.0
// Collectives of the test device "npu": copies on the host, which gloo sends.
//
// A call copies what it reads and begins; what it writes is written when its work is waited for.
// What only moves is sent as bytes, so every dtype can be.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace
{

using at::Tensor;
using c10::intrusive_ptr;
using c10d::OpType, c10d::Work;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using Sizes = std::vector<int64_t>;

// What the group does is no operation of autograd, and changes no version of a tensor.
struct Hidden {
    at::AutoDispatchBelowADInplaceOrView below;
};

void check_device(const Tensor &tensor)
{
    TORCH_CHECK(tensor.device().type() == c10::DeviceType::PrivateUse1, "npucl: a tensor on ",
                tensor.device());
}

Tensor host_copy(const Tensor &tensor)
{
    check_device(tensor);
    const Hidden hidden;
    return tensor.cpu().contiguous();
}

Tensor bytes_of(const Tensor &tensor)
{
    return host_copy(tensor).reshape({-1}).view(at::kByte);
}

Tensors bytes_of(const Tensors &tensors)
{
    Tensors made;
    for (const auto &tensor : tensors) {
        made.push_back(bytes_of(tensor));
    }
    return made;
}

// Bytes on the host for a tensor that a collective writes.
Tensor room_for(const Tensor &tensor)
{
    check_device(tensor);
    return at::empty({tensor.numel() * static_cast<int64_t>(tensor.itemsize())}, at::kByte);
}

Tensors room_for(const Tensors &tensors)
{
    Tensors made;
    for (const auto &tensor : tensors) {
        made.push_back(room_for(tensor));
    }
    return made;
}

void put(const Tensor &target, const Tensor &found)
{
    const Hidden hidden;
    auto flat = found.scalar_type() == at::kByte ? found.view(target.scalar_type()) : found;
    target.copy_(flat.view(target.sizes()));
}

void put(const Tensors &targets, const Tensors &found)
{
    for (size_t number = 0; number < targets.size(); number++) {
        put(targets[number], found[number]);
    }
}

int64_t row_bytes(const Tensor &tensor)
{
    const auto rows = tensor.dim() ? tensor.size(0) : 1;
    return rows ? tensor.numel() / rows * static_cast<int64_t>(tensor.itemsize()) : 0;
}

Sizes times(Sizes sizes, int64_t factor)
{
    for (auto &size : sizes) {
        size *= factor;
    }
    return sizes;
}

Sizes counts(const Tensors &tensors)
{
    Sizes made;
    for (const auto &tensor : tensors) {
        made.push_back(tensor.numel());
    }
    return made;
}

// Works of gloo, and what is to be done when all are over.
class Staged : public Work
{
  public:
    Staged(int rank, OpType type, std::vector<intrusive_ptr<Work>> parts,
           std::function<void()> finish, Tensors outputs)
        : Work(rank, type), parts_(std::move(parts)), finish_(std::move(finish)),
          outputs_(std::move(outputs))
    {
    }

    bool isCompleted() override
    {
        for (const auto &part : parts_) {
            if (!part->isCompleted()) {
                return false;
            }
        }
        return wait(kNoTimeout);
    }
    bool isSuccess() const override
    {
        return true;
    } // a failure is raised by `wait`
    bool wait(std::chrono::milliseconds timeout) override
    {
        for (const auto &part : parts_) {
            part->wait(timeout);
        }
        std::lock_guard<std::mutex> guard(lock_);
        if (finish_) {
            finish_();
            finish_ = nullptr;
        }
        return true;
    }
    void synchronize() override
    {
        wait(kNoTimeout);
    }
    Tensors result() override
    {
        return outputs_;
    }
    int sourceRank() const override
    {
        return parts_.at(0)->sourceRank();
    }
    // It is complete when it is handed out.
    intrusive_ptr<c10::ivalue::Future> getFuture() override
    {
        wait(kNoTimeout);
        std::vector<c10::Device> devices;
        for (const auto &output : outputs_) {
            devices.push_back(output.device());
        }
        auto made = c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()), devices);
        made->markCompleted(c10::IValue(outputs_));
        return made;
    }

  private:
    std::vector<intrusive_ptr<Work>> parts_;
    std::function<void()> finish_;
    const Tensors outputs_;
    std::mutex lock_;
};

class Group final : public c10d::Backend
{
  public:
    explicit Group(intrusive_ptr<Backend> gloo)
        : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo))
    {
    }

    const std::string getBackendName() const override
    {
        return "npucl";
    }
    bool supportsCoalescing() const override
    {
        return true;
    }
    void setTimeout(std::chrono::milliseconds timeout) override
    {
        gloo_->setTimeout(timeout);
    }
    void setSequenceNumberForGroup() override
    {
        gloo_->setSequenceNumberForGroup();
    }
    uint64_t getSequenceNumberForGroup() override
    {
        return gloo_->getSequenceNumberForGroup();
    }

    intrusive_ptr<Work> broadcast(Tensors &tensors, const c10d::BroadcastOptions &options) override
    {
        auto copies = bytes_of(tensors);
        return begun(OpType::BROADCAST, gloo_->broadcast(copies, options), tensors, copies);
    }

    // One work of those that `begin` makes of each output and its input.
    template <typename Begin>
    intrusive_ptr<Work> of_each(Tensors &outputs, Tensors &inputs, Begin begin)
    {
        std::vector<intrusive_ptr<Work>> parts;
        for (size_t number = 0; number < inputs.size(); number++) {
            parts.push_back(begin(outputs.at(number), inputs[number]));
        }
        return all_of(OpType::COALESCED, std::move(parts), outputs);
    }

    // ---- reductions ----

    intrusive_ptr<Work> allreduce(Tensors &tensors, const c10d::AllreduceOptions &options) override
    {
        std::vector<intrusive_ptr<Work>> parts;
        for (const auto &tensor : tensors) {
            parts.push_back(summed(tensor, options.reduceOp, options.timeout, tensor, 0));
        }
        return all_of(OpType::ALLREDUCE, std::move(parts), tensors);
    }
    intrusive_ptr<Work> allreduce_coalesced(Tensors &tensors,
                                            const c10d::AllreduceCoalescedOptions &options) override
    {
        return allreduce(tensors, options);
    }
    intrusive_ptr<Work> reduce(Tensors &tensors, const c10d::ReduceOptions &options) override
    {
        return summed(tensors.at(0), options.reduceOp, options.timeout,
                      options.rootRank == rank_ ? tensors[0] : Tensor(), 0);
    }
    intrusive_ptr<Work> reduce_scatter(Tensors &outputs, Lists &inputs,
                                       const c10d::ReduceScatterOptions &options) override
    {
        Tensors flat;
        int64_t offset = 0;
        for (int rank = 0; rank < size_; rank++) {
            flat.push_back(inputs.at(0).at(rank).reshape({-1}));
            offset += rank < rank_ ? flat.back().numel() : 0;
        }
        return summed(at::cat(flat), options.reduceOp, options.timeout, outputs.at(0), offset);
    }
    intrusive_ptr<Work> _reduce_scatter_base(Tensor &output, Tensor &input,
                                             const c10d::ReduceScatterOptions &options) override
    {
        TORCH_CHECK(input.numel() == output.numel() * size_, "npucl: reduce_scatter of ",
                    input.numel(), " numbers into ", size_, " times ", output.numel());
        return summed(input, options.reduceOp, options.timeout, output, output.numel() * rank_);
    }
    intrusive_ptr<Work>
    reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                    const c10d::ReduceScatterOptions &options) override
    {
        return of_each(outputs, inputs, [&](Tensor &output, Tensor &input) {
            return _reduce_scatter_base(output, input, options);
        });
    }

    // ---- what only moves ----

    intrusive_ptr<Work> allgather(Lists &outputs, Tensors &inputs,
                                  const c10d::AllgatherOptions &options) override
    {
        auto copies = bytes_of(inputs);
        Lists room = {room_for(outputs.at(0))};
        auto part = gloo_->allgather(room, copies, options);
        return begun(OpType::ALLGATHER, std::move(part), outputs[0], room[0]);
    }
    intrusive_ptr<Work> _allgather_base(Tensor &output, Tensor &input,
                                        const c10d::AllgatherOptions &options) override
    {
        auto copy = bytes_of(input), room = room_for(output);
        auto part = gloo_->_allgather_base(room, copy, options);
        return begun(OpType::_ALLGATHER_BASE, std::move(part), {output}, {room});
    }
    intrusive_ptr<Work>
    allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                    const c10d::AllgatherOptions &options) override
    {
        return of_each(outputs, inputs, [&](Tensor &output, Tensor &input) {
            return _allgather_base(output, input, options);
        });
    }
    intrusive_ptr<Work> gather(Lists &outputs, Tensors &inputs,
                               const c10d::GatherOptions &options) override
    {
        auto copies = bytes_of(inputs);
        Lists room;
        for (const auto &list : outputs) {
            room.push_back(room_for(list));
        }
        auto part = gloo_->gather(room, copies, options);
        return outputs.empty() ? begun(OpType::GATHER, std::move(part), {}, {})
                               : begun(OpType::GATHER, std::move(part), outputs[0], room[0]);
    }
    intrusive_ptr<Work> scatter(Tensors &outputs, Lists &inputs,
                                const c10d::ScatterOptions &options) override
    {
        Lists copies;
        for (const auto &list : inputs) {
            copies.push_back(bytes_of(list));
        }
        auto room = room_for(outputs);
        return begun(OpType::SCATTER, gloo_->scatter(room, copies, options), outputs, room);
    }
    intrusive_ptr<Work> alltoall_base(Tensor &output, Tensor &input, Sizes &output_sizes,
                                      Sizes &input_sizes,
                                      const c10d::AllToAllOptions &options) override
    {
        auto copy = bytes_of(input), room = room_for(output);
        auto to = times(output_sizes, row_bytes(output));
        auto from = times(input_sizes, row_bytes(input));
        auto part = gloo_->alltoall_base(room, copy, to, from, options);
        return begun(OpType::ALLTOALL_BASE, std::move(part), {output}, {room});
    }
    intrusive_ptr<Work> alltoall(Tensors &outputs, Tensors &inputs,
                                 const c10d::AllToAllOptions &options) override
    {
        auto copies = bytes_of(inputs), rooms = room_for(outputs);
        auto from = counts(copies), to = counts(rooms);
        auto copy = at::cat(copies), room = at::cat(rooms);
        const auto found = room.split_with_sizes(to);
        auto part = gloo_->alltoall_base(room, copy, to, from, options);
        return begun(OpType::ALLTOALL, std::move(part), outputs, found);
    }
    intrusive_ptr<Work> send(Tensors &tensors, int target, int tag) override
    {
        auto copies = bytes_of(tensors);
        return begun(OpType::SEND, gloo_->send(copies, target, tag), {}, copies);
    }
    intrusive_ptr<Work> recv(Tensors &tensors, int source, int tag) override
    {
        auto room = room_for(tensors);
        return begun(OpType::RECV, gloo_->recv(room, source, tag), tensors, room);
    }
    intrusive_ptr<Work> recvAnysource(Tensors &tensors, int tag) override
    {
        auto room = room_for(tensors);
        return begun(OpType::RECVANYSOURCE, gloo_->recvAnysource(room, tag), tensors, room);
    }
    intrusive_ptr<Work> barrier(const c10d::BarrierOptions &options) override
    {
        c10d::BarrierOptions host;
        host.timeout = options.timeout;
        return begun(OpType::BARRIER, gloo_->barrier(host), {}, {});
    }

    // ---- several calls as one ----

    void startCoalescing() override
    {
        coalesced_.emplace();
    }
    intrusive_ptr<Work> endCoalescing() override
    {
        auto parts = std::move(coalesced_.value());
        coalesced_.reset();
        return all_of(OpType::COALESCED, std::move(parts), {});
    }

  private:
    // The work that puts what came into its tensors.
    intrusive_ptr<Work> begun(OpType type, intrusive_ptr<Work> part, Tensors targets, Tensors found)
    {
        // Copies that are sent live as long as the work, too.
        auto finish = [targets, found] { put(targets, found); };
        return noted(c10::make_intrusive<Staged>(
            rank_, type, std::vector<intrusive_ptr<Work>>{part}, finish, targets));
    }

    // The sum over the ranks, or another reduction; of it as many numbers as `target` has from
    // `offset` on. None where there is no target.
    intrusive_ptr<Work> summed(const Tensor &input, c10d::ReduceOp op,
                               std::chrono::milliseconds timeout, const Tensor &target,
                               int64_t offset)
    {
        c10d::AllreduceOptions options;
        const bool mean = op == c10d::ReduceOp::AVG; // which gloo has not
        options.reduceOp = mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
        options.timeout = timeout;
        Tensors copies = {host_copy(input)};
        if (mean) { // as NCCL and DDP do it: a half that is subnormal is rounded before the sum
            const Hidden hidden;
            copies[0].div_(size_);
        }
        auto part = gloo_->allreduce(copies, options);
        auto finish = [copy = copies[0], target, offset] {
            if (!target.defined()) {
                return;
            }
            auto found = copy.reshape({-1}).narrow(0, offset, target.numel());
            const Hidden hidden;
            target.copy_(found.view(target.sizes()));
        };
        return noted(c10::make_intrusive<Staged>(rank_, OpType::ALLREDUCE,
                                                 std::vector<intrusive_ptr<Work>>{part}, finish,
                                                 target.defined() ? Tensors{target} : Tensors{}));
    }

    intrusive_ptr<Work> all_of(OpType type, std::vector<intrusive_ptr<Work>> parts,
                               const Tensors &outputs)
    {
        return c10::make_intrusive<Staged>(rank_, type, std::move(parts), nullptr, outputs);
    }

    intrusive_ptr<Work> noted(intrusive_ptr<Work> work)
    {
        if (coalesced_) {
            coalesced_->push_back(work);
        }
        return work;
    }

    const intrusive_ptr<Backend> gloo_;
    std::optional<std::vector<intrusive_ptr<Work>>> coalesced_;
};

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    m.def("make", [](intrusive_ptr<c10d::Backend> gloo) -> intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<Group>(std::move(gloo));
    });
}
