# SPDX-License-Identifier: Apache-2.0
"""The environment: what each variable accepts, which name counts, and when it is read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_engine.common import config

pytestmark = pytest.mark.usefixtures("no_variables")

FLAGS = [v for v in config.TABLE if isinstance(v.default, bool)]
ALIASED = [v for v in config.TABLE if v.aliases]

# A text that each variable understands, and its value.
GOOD = {v.name: (str(int(not v.default)), not v.default) for v in FLAGS} | {
    "TE_BACKWARD_OVERRIDE": ("dequantized", "dequantized"),
    "TE_EXTRA_STATE": ("always", "always"),
    "TE_NVFP4_4OVER6": ("weights", "weights"),
    "TE_NVFP4_4OVER6_E4M3_USE_256": ("none", "none"),
    "TE_NVFP4_4OVER6_ERR_MODE": ("MSE", "MSE"),
    "TE_DPA_FP8_RECIPE": ("F16", "F16"),
    "TE_DPA_FP8_FORMAT": ("E4M3", "E4M3"),
    "TE_DPA_FP8DS_AMAX_ALGO": ("max", "max"),
    "TE_DPA_FP8DS_AMAX_HISTLEN": ("16", 16),
    "TE_CACHE_DIR": ("/somewhere", Path("/somewhere")),
    "TE_FL_PREFER": ("Vendor", "vendor"),
    "TE_FL_ALLOW_VENDORS": ("one, two", ("one", "two")),
    "TE_FL_DENY_VENDORS": ("one", ("one",)),
    "TE_FL_PER_OP": ("a=vendor|flagos; b = x", (("a", ("vendor", "flagos")), ("b", ("x",)))),
    "TE_FL_PLUGIN_MODULES": ("a.b,c", ("a.b", "c")),
    "TE_FL_LOG_LEVEL": ("debug", "DEBUG"),
    "TE_PLUGIN": ("a.b", "a.b"),
}
BAD = {
    "TE_CACHE_DIR": "relative/path",
    "TE_FL_ALLOW_VENDORS": ",",
    "TE_FL_DENY_VENDORS": ",,",
    "TE_FL_PER_OP": "op",
    "TE_FL_PLUGIN_MODULES": ",",
    "TE_PLUGIN": "a-b",
}


def ids(variable):
    return variable.name


def test_table_is_well_formed():
    names = [name for v in config.TABLE for name in (v.name, *v.aliases)]
    assert len(names) == len(set(names))
    for variable in config.TABLE:
        assert getattr(config, variable.name) is variable
        assert variable.name.startswith("TE_")
        assert all(alias.startswith(("NVTE_", "TEFL_")) for alias in variable.aliases)
        assert variable.doc.endswith(".") and variable.accepted


def test_every_variable_has_a_good_text_here():
    assert set(GOOD) == {v.name for v in config.TABLE}


@pytest.mark.parametrize("variable", config.TABLE, ids=ids)
@pytest.mark.parametrize("text", [None, "", "  "])
def test_unset_and_empty_mean_the_default(variable, text, monkeypatch):
    if text is not None:
        monkeypatch.setenv(variable.name, text)
    assert variable.get() == variable.default


@pytest.mark.parametrize("variable", config.TABLE, ids=ids)
def test_value_is_parsed_and_read_anew(variable, monkeypatch):
    text, value = GOOD[variable.name]
    monkeypatch.setenv(variable.name, f" {text} ")
    assert variable.get() == value and type(variable.get()) is type(value)
    monkeypatch.delenv(variable.name)
    assert variable.get() == variable.default


@pytest.mark.parametrize("variable", config.TABLE, ids=ids)
def test_bad_value_names_variable_value_and_accepted(variable, monkeypatch):
    text = BAD.get(variable.name, "maybe")
    for name in (variable.name, *variable.aliases):
        with monkeypatch.context() as m:
            m.setenv(name, text)
            with pytest.raises(ValueError) as e:
                variable.get()
        for part in (f" {name}=", repr(text), variable.accepted):
            assert part in str(e.value)


@pytest.mark.parametrize("variable", ALIASED, ids=ids)
def test_alias_counts_where_the_name_is_unset(variable, monkeypatch):
    text, value = GOOD[variable.name]
    monkeypatch.setenv(variable.aliases[0], text)
    assert variable.get() == value
    monkeypatch.setenv(variable.name, "")
    assert variable.get() == value


@pytest.mark.parametrize("variable", ALIASED, ids=ids)
def test_name_wins_over_alias(variable, monkeypatch):
    text, value = GOOD[variable.name]
    monkeypatch.setenv(variable.name, text)
    monkeypatch.setenv(variable.aliases[0], "maybe")
    assert variable.get() == value


@pytest.mark.parametrize("variable", FLAGS, ids=ids)
@pytest.mark.parametrize(
    ("text", "value"),
    [("0", False), ("1", True), ("false", False), ("true", True), ("True", True), ("FALSE", False)],
)
def test_flag_words(variable, text, value, monkeypatch):
    monkeypatch.setenv(variable.name, text)
    assert variable.get() is value


def test_cache_dir_order(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert config.cache_dir() == Path("/home/someone/.cache/transformer_engine")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # counts as unset
    assert config.cache_dir() == Path("/home/someone/.cache/transformer_engine")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert config.cache_dir() == Path("/caches/transformer_engine")
    monkeypatch.setenv("TE_CACHE_DIR", "~/mine")
    assert config.cache_dir() == Path("/home/someone/mine")


def test_cache_dir_without_a_home(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does without a home
    assert config.cache_dir() is None
    monkeypatch.setenv("TE_CACHE_DIR", "~/mine")
    with pytest.raises(ValueError, match="TE_CACHE_DIR"):
        config.cache_dir()


READS_NOTHING = """
import os, sys

class Spy(dict):
    def note(self, name):
        frame = sys._getframe(2)
        while frame is not None:
            if "transformer_engine" in frame.f_code.co_filename:
                reads.append(name)
            frame = frame.f_back
    def __getitem__(self, name): self.note(name); return super().__getitem__(name)
    def __contains__(self, name): self.note(name); return super().__contains__(name)
    def __iter__(self): self.note("*"); return super().__iter__()
    def get(self, name, default=None): self.note(name); return super().get(name, default)
    def items(self): self.note("*"); return super().items()
    def copy(self): self.note("*"); return super().copy()

reads = []
os.environ = Spy(os.environ)
before = set(sys.modules)
import transformer_engine.common.config as config
import transformer_engine.common.recipe as recipe
assert reads == [], reads
assert "torch" not in sys.modules
others = {name.partition(".")[0] for name in set(sys.modules) - before} - {"transformer_engine"}
assert others <= set(sys.stdlib_module_names), others
recipe.Float8CurrentScaling()
assert "TE_FP8_CURRENT_SCALING_POWER_2_SCALES" in reads  # the spy does see reads
"""


def test_import_reads_no_environment_and_needs_only_the_standard_library():
    root = Path(config.__file__).parents[2]
    subprocess.run([sys.executable, "-c", READS_NOTHING], cwd=root, check=True, timeout=60)


def test_no_other_module_reads_the_environment():
    package = Path(config.__file__).parents[1]
    readers = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "os.environ" in path.read_text() or "getenv" in path.read_text()
    ]
    assert readers == ["common/config.py"]


# ---- switches of attention -----------------------------------------------------------------------

SWITCHES = ("FLASH_ATTN", "FUSED_ATTN", "UNFUSED_ATTN", "ALLOW_NONDETERMINISTIC_ALGO")


@pytest.mark.parametrize("off", SWITCHES)
@pytest.mark.parametrize("prefix", ["TE", "NVTE"])
def test_attention_switches_are_read_at_each_call(prefix, off, monkeypatch):
    assert config.attention_switches() == ((True,) * 4 + (False,))
    monkeypatch.setenv(f"{prefix}_{off}", "0")
    assert config.attention_switches()[:4] == tuple(each != off for each in SWITCHES)
    monkeypatch.setenv(f"TE_{off}", "1")  # the TE name counts
    assert config.attention_switches() == ((True,) * 4 + (False,))
    monkeypatch.setenv(f"TE_{off}", "no")
    with pytest.raises(ValueError, match=f"TE_{off}='no'"):
        config.attention_switches()


@pytest.mark.parametrize("text", ["0", "-1", "1.5"])
def test_lengths_are_positive(text, monkeypatch):
    monkeypatch.setenv("NVTE_DPA_FP8DS_AMAX_HISTLEN", text)
    with pytest.raises(ValueError, match="NVTE_DPA_FP8DS_AMAX_HISTLEN"):
        config.attention_recipe()


def test_recipe_of_attention_is_read_at_each_call(monkeypatch):
    assert config.attention_recipe() == ("", "HYBRID", "most_recent", 1, True, False, False)
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "DelayedScaling")
    monkeypatch.setenv("NVTE_DPA_FP8DS_AMAX_HISTLEN", "4")
    found = config.attention_recipe()
    assert (found.name, found.amax_history_len) == ("DelayedScaling", 4)


def test_attention_switches_of_another_mapping(monkeypatch):
    """A program may put a plain dictionary in place of os.environ."""
    monkeypatch.setattr(os, "environ", {"NVTE_FUSED_ATTN": "0"})
    assert config.attention_switches() == (True, False, True, True, False)
