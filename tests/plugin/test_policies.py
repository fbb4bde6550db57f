# SPDX-License-Identifier: Apache-2.0
"""Policies: the order of kinds, tokens, vendors, and what the environment says."""

import itertools

import pytest
from plugged_managers import ALL, KINDS, impl, manager_of

from transformer_engine.plugin.core import (
    SelectionPolicy,
    get_policy,
    match_token,
    policy_context,
    policy_from_env,
    reset_global_policy,
    with_allowed_vendors,
    with_denied_vendors,
    with_preference,
)

pytestmark = pytest.mark.usefixtures("environment")


@pytest.mark.parametrize("prefer", KINDS)
def test_order_of_kinds(prefer):
    manager = manager_of(*map(impl, ALL))
    with with_preference(prefer) as policy:
        order = [one.impl_id for one in manager.resolve_candidates("op")]
        assert manager.call("op") == order[0] == manager.get_selected_impl_id("op")
        assert manager.resolve("op")() == order[0]
    assert policy.prefer == prefer and order[0].startswith(prefer)
    assert order == [i for token in policy.get_default_order()
                     for i in sorted(ALL, reverse=True) if i.startswith(token)]  # fmt: skip


def test_priority_counts_inside_of_a_token_and_the_alphabet_at_last():
    manager = manager_of(
        impl("vendor.a", priority=3), impl("vendor.b", priority=3), impl("vendor.c", priority=1),
        impl("flagos.f", priority=-5),
    )  # fmt: skip
    found = [one.impl_id for one in manager.resolve_candidates("op")]
    assert found == ["flagos.f", "vendor.b", "vendor.a", "vendor.c"]


def test_tokens():
    vendor = impl("vendor.CUDA")
    for token in ("vendor", "vendor:CUDA", "vendor:cuda", "vendor:nvidia", "impl:vendor.CUDA"):
        assert match_token(vendor, token)
    for token in ("flagos", "default", "reference", "vendor:amd", "impl:vendor.cuda"):
        assert not match_token(vendor, token)
    assert match_token(impl("flagos.f"), "default") and match_token(impl("flagos.f"), "flagos")
    for token in ("", "cuda", "vendor:", "impl:", "Vendor", "kind:x", 3):
        with pytest.raises(ValueError, match="expected flagos"):
            match_token(vendor, token)
        with pytest.raises(ValueError, match="expected flagos"):
            SelectionPolicy(per_op_order=(("op", (token,)),))


def test_an_order_of_an_operator_is_all_of_it():
    manager = manager_of(*map(impl, ALL), impl("flagos.f", op="other"))
    order = {"op": ["impl:reference.torch", "vendor:AMD"]}
    with policy_context(SelectionPolicy.from_dict(per_op_order=order)):
        found = [one.impl_id for one in manager.resolve_candidates("op")]
        assert found == ["reference.torch", "vendor.amd"]
        assert manager.call("other") == "flagos.f"
    with (
        policy_context(SelectionPolicy.from_dict(per_op_order={"op": ["vendor:none"]})),
        pytest.raises(RuntimeError, match="none of the tokens vendor:none names it"),
    ):
        manager.call("op")


def test_vendors():
    manager = manager_of(*map(impl, ALL))

    def vendors():
        found = [one.impl_id for one in manager.resolve_candidates("op")]
        return {one for one in found if one.startswith("vendor")}

    assert vendors() == {"vendor.CUDA", "vendor.amd"}
    with with_allowed_vendors("Nvidia"):
        assert vendors() == {"vendor.CUDA"}
        with with_denied_vendors("cuda"):  # denied wins
            assert vendors() == set()
    with with_denied_vendors("amd"), with_denied_vendors("nvidia") as policy:
        assert vendors() == set() and policy.deny_vendors == {"amd", "nvidia"}
    with policy_context(SelectionPolicy(allow_vendors=frozenset())):
        assert vendors() == set()
    assert SelectionPolicy.from_dict(allow_vendors=()).allow_vendors is None


def test_fingerprints_tell_policies_apart():
    made = [
        SelectionPolicy(prefer, strict, orders, denied, allowed)
        for prefer, strict, orders, denied, allowed in itertools.product(
            KINDS,
            (False, True),
            ((), (("op", ("vendor", "flagos")),)),
            (frozenset(), frozenset({"a"})),
            (None, frozenset(), frozenset({"a"})),
        )  # fmt: skip
    ]
    assert len({policy.fingerprint() for policy in made}) == len(set(made)) == len(made)
    one = SelectionPolicy(per_op_order=(("b", ("vendor",)), ("a", ("flagos",))))
    other = SelectionPolicy.from_dict(per_op_order={"a": ["flagos"], "b": ["vendor"]})
    assert one == other and hash(one) == hash(other)
    assert one.get_per_op_order("a") == ["flagos"] and one.get_per_op_order("c") is None
    for wrong in ("cuda", "", None):
        with pytest.raises(ValueError, match="prefer="):
            SelectionPolicy(wrong)
    with pytest.raises(ValueError, match="op is there twice"):
        SelectionPolicy(per_op_order=(("op", ("vendor",)), ("op", ("flagos",))))


@pytest.mark.parametrize("wrong", ["amd", [3], [("amd",)]])
def test_vendors_are_names(wrong):
    """A text is no set of its letters, which would be vendors that nobody has."""
    with pytest.raises(TypeError, match="allow_vendors=.*expected a set of names"):
        SelectionPolicy(allow_vendors=wrong)
    with pytest.raises(TypeError, match="deny_vendors=.*expected a set of names"):
        SelectionPolicy.from_dict(deny_vendors=wrong)
    if wrong != "amd":
        for context in with_allowed_vendors, with_denied_vendors:
            with pytest.raises(TypeError, match="vendors=.*expected a set of names"):
                context(*wrong)


def test_policy_of_the_environment(monkeypatch):
    for name, value in {
        "PREFER": "Reference", "STRICT": "1", "ALLOW_VENDORS": "nvidia, amd",
        "DENY_VENDORS": "amd", "PER_OP": "gelu=vendor:amd|default;relu=reference",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"TE_FL_{name}", value)
    reset_global_policy()
    orders = {"gelu": ["vendor:amd", "default"], "relu": ["reference"]}
    expected = SelectionPolicy.from_dict("reference", True, orders, {"amd"}, {"nvidia", "amd"})
    assert get_policy() == policy_from_env() == expected
    monkeypatch.setenv("TE_FL_PREFER", "")
    monkeypatch.setenv("TE_FL_PREFER_VENDOR", "1")
    assert policy_from_env().prefer == "vendor"
    for name, value in (("PREFER", "cuda"), ("PER_OP", "gelu"), ("STRICT", "maybe"),
                        ("PER_OP", "gelu=cuda")):  # fmt: skip
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=f"TE_FL_{name}"):
            patch.setenv(f"TE_FL_{name}", value)
            policy_from_env()
