# SPDX-License-Identifier: Apache-2.0
"""Delayed scaling in several threads: models that train side by side do not see each other."""

import copy
import threading

import pytest
import torch
from pytorch.helpers import arenas, assert_same_bits, counted, state_of, states_of

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8CurrentScaling,
)
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.execution.thread_state import current_state
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

WIDTH, ROWS, STEPS, PARTS, THREADS = 32, 16, 4, 3, 8
RECIPES = {
    "equal": lambda number: DelayedScaling(amax_history_len=3),
    "own": lambda number: DelayedScaling(
        amax_history_len=2 + number % 3,
        margin=number % 2,
        amax_compute_algo=("max", "most_recent")[number // 4],
    ),
}


def in_threads(*functions):
    """Run functions in threads of their own, at the same time; return what they return."""
    results, errors = [None] * len(functions), []

    def work(number):
        try:
            results[number] = functions[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def model_on(device):
    return torch.nn.Sequential(
        te.Linear(WIDTH, WIDTH, device=device), te.LayerNormMLP(WIDTH, 2 * WIDTH, device=device)
    )


def step(model, recipe, x, grad):
    with te.autocast(recipe=recipe):
        out = model(x)
    out.backward(grad)
    return out


def batch(device):
    """Input and output gradient, of any size."""
    factors = 2.0 ** torch.randint(-6, 7, (2,))
    return [torch.randn(ROWS, WIDTH, device=device) * float(f) for f in factors]


class Training:
    """One model's training: its weights and data are made beforehand, its model when it runs."""

    def __init__(self, number, device, make_recipe):
        self.device, self.recipe = device, make_recipe(number)
        self.weights = model_on(device).state_dict()
        self.data = [[batch(device) for _ in range(PARTS)] for _ in range(STEPS)]

    def run(self, wait=lambda: None):
        """Train; a region has several forwards, and `wait` is called before each of them."""
        model = model_on(self.device)
        model.load_state_dict(self.weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        trace = []
        for parts in self.data:
            outputs = []
            with te.autocast(recipe=self.recipe):
                for x, _ in parts:
                    wait()
                    outputs.append(model(x))
            for out, (_, grad) in zip(outputs, parts, strict=True):
                out.backward(grad)
            trace += [outputs, [p.grad.clone() for p in model.parameters()], states_of(model)]
            optimizer.step()
            optimizer.zero_grad()
        return trace


@pytest.mark.parametrize("recipes", RECIPES)
def test_models_of_eight_threads_are_those_of_serial_runs(device, recipes):
    """The even threads leave their regions while the odd ones are in the middle of theirs."""
    trainings = [Training(number, device, RECIPES[recipes]) for number in range(THREADS)]
    expected = [training.run() for training in trainings]
    for _ in range(2):
        barrier = threading.Barrier(THREADS, timeout=60)

        def side_by_side(number, barrier=barrier):
            if number % 2:
                barrier.wait()
            found = trainings[number].run(barrier.wait)
            if not number % 2:
                barrier.wait()
            return found

        with counted() as gemms:
            found = in_threads(*[lambda n=n: side_by_side(n) for n in range(THREADS)])
        assert (gemms.fp8, gemms.other) == (THREADS * STEPS * PARTS * (3 + 6 - 1), 0)
        assert_same_bits(found, expected)


# ---- one model and several threads ---------------------------------------------------------------


@pytest.mark.parametrize("current", [False, True], ids=["delayed", "current-first"])
def test_a_model_goes_from_thread_to_thread(device, current):
    """Each step in a thread of its own is as all in one, an idle module's state included.

    The module whose backward updates the others' scales may have none itself.
    """
    recipe, results = DelayedScaling(amax_history_len=2), []
    model, data = model_on(device), [batch(device) for _ in range(STEPS)]
    first, idle = te.Linear(WIDTH, WIDTH, device=device), te.Linear(WIDTH, WIDTH, device=device)
    weights = [{k: v.clone() for k, v in m.state_dict().items()} for m in (model, idle)]

    def train(x, grad):
        with te.autocast(recipe=recipe):
            if current:
                with te.autocast(recipe=Float8CurrentScaling()):
                    x = first(x)
            out = model(x)
        out.backward(grad)

    for run in (lambda f: f(), in_threads):
        te.reset()
        for module, state in zip((model, idle), weights, strict=True):
            module.load_state_dict(state)
            module.zero_grad()
        with torch.no_grad(), te.autocast(recipe=recipe):
            model(data[0][0])
            idle(data[0][0])
        for pair in data:
            run(lambda pair=pair: train(*pair))
        results.append([states_of(model), state_of(idle), [p.grad for p in model.parameters()]])
        assert (state_of(idle)["forward"][1][0] == 0).all()  # the amaxes were taken in
        assert state_of(model[0])["backward"][0][0] != 1
    assert_same_bits(*results)


def test_a_backward_in_another_thread_updates_the_model_of_the_forward(device):
    """A pipeline: the thread of the backward has a model of its own."""
    recipe = DelayedScaling(amax_history_len=4)
    model, other = (te.Linear(WIDTH, WIDTH, device=device) for _ in range(2))
    x, grad = batch(device)
    outputs = []
    for _ in range(2):
        with te.autocast(recipe=recipe):
            outputs.append(model(x))

    def backward():
        with te.autocast(recipe=recipe):
            late = other(x)
        before = state_of(other)
        for out in outputs:
            out.backward(grad)
        assert_same_bits(state_of(other), before)
        late.backward(grad)

    in_threads(backward)
    for layer, count in ((model, 2), (other, 1)):
        assert (state_of(layer)["backward"][1][:, 0] > 0).sum() == count


def test_a_first_module_without_state_updates_that_of_the_second(device):
    """Also where what the thread had was dropped before."""

    def factory(role):
        if role.name == "second":
            return DelayedScalingRequest(amax_history_len=3)
        return te.Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device)

    layers = [te.Linear(WIDTH, WIDTH, device=device, name=name) for name in ("first", "second")]
    x, grad = (torch.randn(ROWS, WIDTH, device=device) for _ in range(2))
    results = []
    for _ in range(2):  # the second time there is something to drop
        te.reset()
        own = copy.deepcopy(layers)
        with te.autocast(recipe=CustomRecipe(factory)):
            y = own[1](own[0](x))
        y.backward(grad)
        results.append(state_of(own[1]))
        assert (results[-1]["backward"][0] != 1).any()
    assert_same_bits(*results)


def test_evaluation_in_another_thread_joins_nothing(device):
    recipe = DelayedScaling(amax_history_len=4)
    mine, theirs = (te.Linear(WIDTH, WIDTH, device=device) for _ in range(2))
    x, grad = batch(device)
    step(mine, recipe, x, grad)
    in_threads(lambda: step(theirs, recipe, x, grad))
    before = state_of(theirs)
    with torch.no_grad(), te.autocast(recipe=recipe):
        theirs(x)
    waiting = state_of(theirs)
    assert (waiting["forward"][1][0, :2] > 0).all()
    step(mine, recipe, x, grad)
    assert_same_bits(state_of(theirs), waiting)
    step(theirs, recipe, x, grad)  # this thread trains it from now on
    step(mine, recipe, x, grad)
    assert (state_of(theirs)["forward"][1][:, 0] > 0).sum() == 2
    assert_same_bits(before["forward"][1][-1], state_of(theirs)["forward"][1][-2])
    with torch.no_grad(), te.autocast(recipe=recipe):
        theirs(x)
    step(mine, recipe, x, grad)  # an idle module of this thread
    assert (state_of(theirs)["forward"][1][0] == 0).all()


def test_a_thread_that_only_evaluated_its_own_model_joins_another_one(device):
    recipe = DelayedScaling(amax_history_len=4)
    mine, theirs = (te.Linear(WIDTH, WIDTH, device=device) for _ in range(2))
    x, grad = batch(device)
    in_threads(lambda: step(theirs, recipe, x, grad))
    with torch.no_grad(), te.autocast(recipe=recipe):
        mine(x)
    step(theirs, recipe, x, grad)
    for layer, count in ((mine, 1), (theirs, 2)):
        assert (state_of(layer)["forward"][1][1:, 0] > 0).sum() == count
    step(mine, recipe, x, grad)
    assert (state_of(mine)["backward"][0][0], state_of(mine)["forward"][0][0]) != (1, 1)
    assert mine._slots.domain.joined is theirs._slots.domain.joined


def test_workers_that_take_over_what_is_in_force(device):
    """Their modules belong to the thread whose region it is, which updates them."""
    x, _ = batch(device)
    layers = [te.Linear(WIDTH, WIDTH, device=device) for _ in range(3)]
    with te.autocast(recipe=DelayedScaling(amax_history_len=2)):
        state = FP8GlobalStateManager.get_autocast_state()

        def work(layer):
            FP8GlobalStateManager.set_autocast_state(state)
            layer(x)

        in_threads(*[lambda layer=layer: work(layer) for layer in layers])
    assert all((state_of(layer)["forward"][0][:2] != 1).all() for layer in layers)


def test_update_on_demand_from_a_thread_without_modules(device):
    """Threads of backwards have none: they update all models, in the order of these."""
    recipe = DelayedScaling(amax_history_len=2)
    x, _ = batch(device)
    layers = [te.Linear(WIDTH, WIDTH, device=device) for _ in range(2)]

    def record(layer):
        with torch.no_grad(), te.autocast(recipe=recipe):
            layer(x)

    for layer in layers:
        in_threads(lambda layer=layer: record(layer))
    assert all((state_of(layer)["forward"][0] == 1).all() for layer in layers)
    in_threads(FP8GlobalStateManager.reduce_and_update_fp8_tensors)
    assert all((state_of(layer)["forward"][0][:2] != 1).all() for layer in layers)


def test_a_copy_belongs_to_the_thread_that_runs_it(device):
    """How a model is handed to a thread of its own; nothing is left of what is gone."""
    recipe = DelayedScaling(amax_history_len=2)
    x, grad = batch(device)
    model = te.Linear(WIDTH, WIDTH, device=device)
    step(model, recipe, x, grad)
    twin = te.Linear(WIDTH, WIDTH, device=device)

    def take_over():
        twin.load_state_dict(model.state_dict())
        step(twin, recipe, 3 * x, grad)

    in_threads(take_over)
    assert current_state().domain.joined == [model._slots.domain]
    assert twin._slots.domain not in current_state().domain.joined
    assert len(arenas("forward")) == len(arenas("backward")) == 2


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_compiled_for_one_thread_and_run_in_others(device, where):
    """Threads that have run nothing, and one that has a model of its own."""
    torch._dynamo.reset()
    recipe = DelayedScaling(amax_history_len=4)
    x, grad = batch(device)
    model, own = (te.Linear(WIDTH, WIDTH, device=device) for _ in range(2))

    def inside(x):
        with te.autocast(recipe=recipe):
            return model(x)

    run = torch.compile(inside if where == "inside" else model, fullgraph=True, backend="aot_eager")

    def train():
        if where == "inside":
            run(x).backward(grad)
        else:
            step(run, recipe, x, grad)

    def with_own():
        step(own, recipe, x, grad)
        train()

    for number, thread in enumerate([train, train, train, with_own, train]):
        in_threads(thread)
        for direction in ("forward", "backward"):
            rolled = (state_of(model)[direction][1][:, 0] > 0).sum()
            assert rolled == min(number + 1, 3 if direction == "forward" else 3), (
                number,
                direction,
            )
    torch._dynamo.reset()
