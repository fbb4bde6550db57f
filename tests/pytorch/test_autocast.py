# SPDX-License-Identifier: Apache-2.0
"""`autocast`: what is in force where, who updates, and what a wrong use does."""

import sys
import threading

import pytest
import torch
from device_kinds import every_device
from pytorch.helpers import assert_same_bits, counted, state_of, states_of

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.execution.thread_state import current_state

pytestmark = every_device


def snapshot():
    """What a thread's region state is."""
    state = current_state()
    return (
        state.enabled,
        state.calibrating,
        state.recipe,
        state.group,
        state.owes_update,
        state.depth,
    )


def step(model, x, **region):
    """Forward in a region, backward outside; return the counted GEMMs."""
    with counted() as gemms:
        with te.autocast(**region):
            out = model(x)
        out.sum().backward()
    return gemms


@pytest.fixture
def layer(device):
    return te.Linear(32, 48, device=device)


@pytest.fixture
def x(device):
    return torch.randn(16, 32, device=device, requires_grad=True)


def test_outside_of_a_region_nothing_is_fp8(layer, x):
    with counted() as gemms:
        layer(x).sum().backward()
    assert (gemms.fp8, gemms.other) == (0, 3)
    assert state_of(layer) is None


def test_disabled_region_is_high_precision(layer, x):
    gemms = step(layer, x, enabled=False)
    assert (gemms.fp8, gemms.other) == (0, 3)
    assert state_of(layer) is None


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_enabled_region_is_fp8(layer, x, recipe):
    made = {
        None: None,
        "delayed": recipes.DelayedScaling(),
        "current": recipes.Float8CurrentScaling(),
    }[recipe]
    gemms = step(layer, x, recipe=made)
    assert (gemms.fp8, gemms.other) == (3, 0)
    assert (state_of(layer) is None) == (recipe == "current")


def test_default_recipe(layer, x):
    assert te.get_default_recipe() == recipes.DelayedScaling()
    assert te.get_default_recipe() is not te.get_default_recipe()
    step(layer, x)
    scale, history = state_of(layer)["forward"]
    assert history.shape == (1024, 3) and scale[0] != 1


def test_positional_arguments_keep_their_order(layer, x):
    recipe = recipes.DelayedScaling(amax_history_len=2)
    region = te.autocast(False, True, recipe, None)
    with region:
        assert snapshot() == (False, True, recipe, None, True, 1)


@pytest.mark.parametrize("names", ["old", "new", "mixed"])
def test_fp8_autocast_argument_names(layer, x, names):
    recipe = recipes.DelayedScaling(amax_history_len=5)
    arguments = {
        "old": dict(enabled=True, calibrating=False, fp8_recipe=recipe, fp8_group=None),
        "new": dict(enabled=True, recipe=recipe, amax_reduction_group=None),
        "mixed": dict(fp8_recipe=recipe, amax_reduction_group=None),
    }[names]
    with counted() as gemms, te.fp8_autocast(**arguments):
        assert current_state().recipe is recipe
        layer(x)
    assert gemms.fp8 == 1
    assert state_of(layer)["forward"][1].shape == (5, 3)


def test_fp8_autocast_refuses_doubled_and_unknown_arguments():
    recipe = recipes.DelayedScaling()
    with pytest.raises(TypeError, match="fp8_recipe and recipe"):
        te.fp8_autocast(fp8_recipe=recipe, recipe=recipe)
    with pytest.raises(TypeError, match="colour"):
        te.fp8_autocast(colour="red")


@pytest.mark.parametrize("wrong", ["delayed", recipes.DelayedScaling, recipes.Format.HYBRID, 3])
def test_wrong_recipe_type(wrong):
    before = snapshot()
    with pytest.raises(TypeError, match=r"recipe: .*DelayedScaling\(\)"):
        te.autocast(recipe=wrong)
    assert snapshot() == before


def test_nested_regions_use_their_own_recipe(device, x):
    outer, inner = recipes.DelayedScaling(amax_history_len=2), recipes.Float8CurrentScaling()
    a, b, c, d = (te.Linear(32, 32, device=device) for _ in range(4))
    begin = snapshot()
    with counted() as gemms:
        with te.autocast(recipe=outer):
            y = a(x)
            middle = snapshot()
            with te.autocast(recipe=inner):
                y = b(y)
            assert snapshot() == middle
            with te.autocast(enabled=False):
                y = c(y)
            assert snapshot() == middle
            y = d(y)
        assert snapshot() == begin
        y.sum().backward()
    assert (gemms.fp8, gemms.other) == (9, 3)
    assert [s is not None for s in map(state_of, (a, b, c, d))] == [True, False, False, True]


def test_inner_exit_updates_nothing(device, x):
    recipe = recipes.DelayedScaling(amax_history_len=3)
    a, b = te.Linear(32, 32, device=device), te.Linear(32, 32, device=device)
    with te.autocast(recipe=recipe):
        y = a(x)
        with te.autocast(recipe=recipe):
            b(y)
        for layer in (a, b):
            scale, history = state_of(layer)["forward"]
            assert (scale == 1).all() and (history[0, :2] > 0).all()
    for layer in (a, b):
        scale, history = state_of(layer)["forward"]
        assert (scale[:2] != 1).all() and (history[0] == 0).all() and (history[2, :2] > 0).all()


def test_enabled_region_inside_a_disabled_one_never_updates_the_forward(layer, x):
    recipe = recipes.DelayedScaling(amax_history_len=3)
    with counted() as gemms, te.autocast(enabled=False):
        with te.autocast(recipe=recipe):
            layer(x)
    assert gemms.fp8 == 1
    scale, history = state_of(layer)["forward"]
    assert (scale == 1).all() and history[0, 0] == x.detach().abs().max()


def test_disabled_region_inside_an_enabled_one_updates_at_the_outer_exit(layer, x):
    recipe = recipes.DelayedScaling(amax_history_len=3)
    with te.autocast(recipe=recipe):
        layer(x)
        with te.autocast(enabled=False):
            pass
        assert (state_of(layer)["forward"][0] == 1).all()
    assert state_of(layer)["forward"][0][0] != 1


def test_left_by_an_exception_updates_nothing(layer, x):
    recipe = recipes.DelayedScaling(amax_history_len=3)
    begin = snapshot()
    region = te.autocast(recipe=recipe)
    with pytest.raises(ZeroDivisionError):
        with region:
            layer(x)
            raise ZeroDivisionError
    assert snapshot() == begin
    scale, history = state_of(layer)["forward"]
    assert (scale == 1).all() and history[0, 0] > 0
    with region:  # a region that was left may be entered again
        pass
    assert state_of(layer)["forward"][0][0] != 1


def test_inner_exception_handled_inside_leaves_the_outer_region_working(layer, x):
    recipe = recipes.DelayedScaling(amax_history_len=3)
    with te.autocast(recipe=recipe):
        middle = snapshot()
        with pytest.raises(ZeroDivisionError), te.autocast(enabled=False):
            raise ZeroDivisionError
        assert snapshot() == middle
        layer(x)
    assert state_of(layer)["forward"][0][0] != 1


def test_no_update_under_no_grad(layer, x):
    recipe = recipes.DelayedScaling(amax_history_len=3)
    with torch.no_grad(), counted() as gemms, te.autocast(recipe=recipe):
        layer(x)
    assert gemms.fp8 == 1
    scale, history = state_of(layer)["forward"]
    assert (scale == 1).all() and (history[1:] == 0).all()


def test_active_instance_can_not_be_entered_again():
    region = te.autocast()
    with region:
        inside = snapshot()
        with pytest.raises(RuntimeError, match="active already"):
            region.__enter__()
        assert snapshot() == inside
    with region:
        assert snapshot() == inside[:2] + (current_state().recipe,) + inside[3:]


def test_as_a_return_value_of_with_and_reuse_in_sequence(layer, x):
    recipe = recipes.DelayedScaling(amax_history_len=4)
    region = te.autocast(recipe=recipe)
    for number in range(3):
        with region as value:
            assert value is None
            layer(x)
        assert (state_of(layer)["forward"][1][:, 0] > 0).sum() == number + 1


def test_regions_belong_to_their_thread(device):
    """Threads with different recipes at the same time do not see each other's."""
    plan = {
        "delayed": recipes.DelayedScaling(amax_history_len=2),
        "current": recipes.Float8CurrentScaling(),
        "off": None,
    }
    layers = {name: te.Linear(32, 32, device=device) for name in plan}
    barrier = threading.Barrier(len(plan) + 1, timeout=60)
    seen, errors = {}, []

    def work(name):
        try:
            x = torch.randn(16, 32, device=device)
            with te.autocast(enabled=name != "off", recipe=plan[name]):
                barrier.wait()
                seen[name] = snapshot()
                layers[name](x)
                barrier.wait()
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(name,)) for name in plan]
    with counted() as gemms:
        for thread in threads:
            thread.start()
        barrier.wait()
        mine = snapshot()
        barrier.wait()
        for thread in threads:
            thread.join()
    assert not errors
    assert mine == (False, False, None, None, False, 0)
    assert (gemms.fp8, gemms.other) == (2, 1)
    for name, value in seen.items():
        assert value[0] == (name != "off") and value[2] is plan[name] and value[5] == 1
    assert state_of(layers["current"]) is None and state_of(layers["delayed"]) is not None


def test_first_module_flag_is_taken_once_and_restored(device, x):
    """The flag is taken by the first module that records a backward, also in an inner region."""
    recipe = recipes.DelayedScaling(amax_history_len=3)
    a, b = te.Linear(32, 32, device=device), te.Linear(32, 32, device=device)
    with te.autocast(recipe=recipe):
        assert current_state().owes_update
        with torch.no_grad():
            a(x)
        assert current_state().owes_update  # nothing was recorded
        y = a(x)
        assert not current_state().owes_update
        with te.autocast(enabled=False):
            assert not current_state().owes_update
        y = b(y)
    assert not current_state().owes_update
    y.sum().backward()
    for layer in (a, b):
        assert state_of(layer)["backward"][1][2, 0] > 0  # one update, after a's backward
    before = states_of(torch.nn.ModuleList([a, b]))
    with te.autocast(recipe=recipe):
        a(x)
    changed = states_of(torch.nn.ModuleList([a, b]))
    assert_same_bits([s["backward"] for s in before], [s["backward"] for s in changed])


def test_region_after_an_aborted_one_has_its_own_first_flag(layer, x):
    recipe = recipes.DelayedScaling(amax_history_len=3)
    with pytest.raises(ZeroDivisionError), te.autocast(recipe=recipe):
        layer(x)
        raise ZeroDivisionError
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.sum().backward()
    assert state_of(layer)["backward"][1][2, 0] == 1


def test_recipe_that_is_written_to_between_steps(layer, x):
    recipe = recipes.DelayedScaling(amax_history_len=3)
    step(layer, x, recipe=recipe)
    before = state_of(layer)
    recipe.margin = 2
    step(layer, x, recipe=recipe)
    after = state_of(layer)
    quarter = before["forward"][0][:2] / 4
    assert_same_bits(after["forward"][0][:2], quarter)


# ---- wrong arguments, decorators, failing entries ----------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((recipes.Float8CurrentScaling(),), {}, ["enabled=", "recipe="]),
        ((True, recipes.DelayedScaling()), {}, ["calibrating=", "recipe="]),
        ((recipes.DelayedScaling,), {}, ["enabled=", "recipe="]),
        (("HYBRID",), {}, ["enabled='HYBRID'", "True or False"]),
        ((print,), {}, ["enabled=", "@autocast()"]),
        ((), {"recipe": recipes.Recipe()}, ["recipe", "DelayedScaling()"]),
        ((), {"recipe": recipes.Recipe}, ["recipe", "DelayedScaling()"]),
        ((), {"recipe": recipes.DelayedScaling}, ["recipe", "DelayedScaling()"]),
        (
            (),
            {"recipe": recipes.DelayedScaling(), "fp8_recipe": recipes.DelayedScaling()},
            ["fp8_recipe", "give one"],
        ),
        ((), {"amax_reduction_group": "a", "fp8_group": "b"}, ["fp8_group", "give one"]),
    ],
)
@pytest.mark.parametrize("make", [te.autocast, te.fp8_autocast])
def test_refused_arguments(make, arguments, options, words):
    with pytest.raises(TypeError) as caught:
        make(*arguments, **options)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("value", [1, 0, None, torch.tensor(True), torch.ones(()).numpy().all()])
def test_what_counts_as_a_bool(value):
    with te.autocast(value):
        assert current_state().enabled is bool(value)


@pytest.mark.parametrize("make", [te.autocast, te.fp8_autocast])
def test_either_name_of_recipe_and_group(make):
    recipe, group = recipes.Float8CurrentScaling(), object()
    with make(fp8_recipe=recipe, fp8_group=group):
        assert current_state().recipe is recipe and current_state().group is group
    with make(recipe=recipe, amax_reduction_group=group):
        assert current_state().recipe is recipe and current_state().group is group


def test_decorator(layer, x):
    recipe = recipes.DelayedScaling(amax_history_len=7)

    @te.autocast(recipe=recipe)
    def forward(inp, *, depth=0):
        """Of the test."""
        assert current_state().recipe is recipe and current_state().depth == depth + 1
        if depth < 2:
            return forward(inp, depth=depth + 1)
        return layer(inp)

    outside = snapshot()
    for _ in range(2):
        with counted() as gemms:
            out = forward(x)
        assert gemms.fp8 == 1 and snapshot() == outside
    out.sum().backward()
    assert forward.__name__ == "forward" and forward.__doc__ == "Of the test."
    assert state_of(layer)["forward"][1].shape[0] == 7
    assert state_of(layer)["forward"][0][0] != 1  # leaving the region has updated the scales


def test_decorated_method_and_two_threads(layer, x):
    class Model:
        @te.autocast(recipe=recipes.Float8CurrentScaling())
        def run(self, barrier=None):
            if barrier is not None:
                barrier.wait(timeout=30)  # both are inside
            return current_state().depth

    model, barrier, depths = Model(), threading.Barrier(2), []
    assert model.run() == 1
    threads = [threading.Thread(target=lambda: depths.append(model.run(barrier))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert depths == [1, 1] and current_state().depth == 0


def test_a_decorated_function_that_raises(layer, x):
    @te.autocast()
    def fails():
        raise ValueError("of the test")

    outside = snapshot()
    with pytest.raises(ValueError, match="of the test"):
        fails()
    assert snapshot() == outside


def _generator():
    yield 1


async def _coroutine():
    return 1


async def _async_generator():
    yield 1


@pytest.mark.parametrize("function", [_generator, _coroutine, _async_generator])
def test_decorator_refuses_what_is_suspended(function):
    with pytest.raises(TypeError, match=f"{function.__name__}.*with block inside"):
        te.autocast()(function)


def test_decorator_refuses_what_is_not_callable():
    with pytest.raises(TypeError, match="3.*not callable"):
        te.autocast()(3)


def test_an_entry_that_raises_leaves_nothing_active(monkeypatch):
    module = sys.modules[te.autocast.__module__]

    def fails():
        raise KeyboardInterrupt

    region, outside = te.autocast(), snapshot()
    with monkeypatch.context() as patched:
        patched.setattr(module, "get_default_recipe", fails)
        with pytest.raises(KeyboardInterrupt):
            region.__enter__()
    assert snapshot() == outside
    with region:
        assert current_state().enabled
    assert snapshot() == outside


def test_exit_without_entry():
    region, outside = te.autocast(), snapshot()
    with pytest.raises(RuntimeError, match="not active.*with block"):
        region.__exit__(None, None, None)
    with region:
        pass
    with pytest.raises(RuntimeError, match="not active"):
        region.__exit__(None, None, None)
    assert snapshot() == outside
