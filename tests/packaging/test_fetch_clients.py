# SPDX-License-Identifier: Apache-2.0
"""Client packages that lie in folders of their own: fetched where tests that run need them."""

import sys

import pytest
from markdown_pages import ROOT

if not (ROOT / "tools/fetch_clients.py").exists():
    pytest.skip("needs the source tree", allow_module_level=True)


@pytest.fixture
def fetch(monkeypatch, tmp_path):
    """tools/fetch_clients.py, where nothing has been fetched and torch has brought no triton."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import fetch_clients

    monkeypatch.setattr(fetch_clients, "folder_of", lambda pin: tmp_path / pin)
    monkeypatch.setattr(fetch_clients, "find_missing", lambda python, names: names)
    return fetch_clients


MEGATRON = {"megatron-core", "triton"}


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        (["tests/clients/test_distribution.py"], set()),
        (["tests/clients/test_peft.py::test_merging"], set()),
        (["tests/clients/test_accelerate.py::test_its_own_tests_pass"], {"accelerate"}),
        (["tests/clients/test_megatron.py", "tests/core"], MEGATRON),
        (["tests/docs/test_code_blocks.py::test_python_with_clients"], {"megatron-core"}),
        (["tests/clients/test_nemo_automodel.py"], {"nemo_automodel"}),
        (["tests/clients/"], MEGATRON | {"accelerate", "nemo_automodel"}),
    ],
    ids=lambda value: value[0].rpartition("/")[2] if isinstance(value, list) else "",
)
def test_what_other_tests_need_is_left_out(fetch, tests, expected):
    wanted = fetch.find_wanted(sys.executable, tests)
    assert {pin.split("==")[0] for _, pin in wanted} == expected


def test_what_is_there_is_not_fetched_again(fetch, tmp_path):
    (_, first), *rest = fetch.find_wanted(sys.executable, ["tests/clients"])
    (tmp_path / first).mkdir()
    assert fetch.find_wanted(sys.executable, ["tests/clients"]) == rest


def test_the_size_is_said_before(fetch, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fetch_clients.py", "tests/clients/test_megatron.py"])
    monkeypatch.setattr(fetch, "download", lambda *args: (_ for _ in ()).throw(KeyError))
    with pytest.raises(KeyError):
        fetch.main()
    assert "about 207 MB" in capsys.readouterr().out
