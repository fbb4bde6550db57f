# SPDX-License-Identifier: Apache-2.0
# `make help` lists the targets. PYTHON= names the interpreter to start from (tools/environment.py
# decides whether it serves as it is); ARGS= is passed on to the program that a target runs.

PYTHON ?= python3
ARGS ?=
NO_BUILD ?=
TESTS ?= tests
CLIENT_TESTS ?= tests/clients tests/docs/test_code_blocks.py::test_python_with_clients
SANITIZE_TESTS ?= tests/core tests/backend tests/plugin/test_c_plugins.py tests/plugin/test_c_plugins_passing.py
WORKERS ?= logical
# Tests share the cores among processes, eight at most (WORKERS=0: one, without pytest-xdist). Two threads in each
# run every parallel loop; a thread that waits sleeps, for another process needs the core.
SPREAD = -n $(WORKERS) --maxprocesses 8 --dist worksteal
test test-clients sanitize: export OMP_NUM_THREADS ?= 2
test test-clients sanitize: export OMP_WAIT_POLICY ?= passive

ENV := build/env/$(subst /,_,$(PYTHON))
DEMO_PY = $$(cat $(ENV)-demo)
TEST_PY = $$(cat $(ENV)-test)
LINT_PY = $$(cat $(ENV)-lint)
CLIENTS_PY = $$(cat $(ENV)-clients)
# The tools of the lint environment, found beside its interpreter first.
LINT_PATH = PATH="$$(dirname "$(LINT_PY)"):$$PATH"

C_FILES = $$(find csrc tests/c tests/cudnn tests/devices \( -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) | sort)
# The sanitizers keep freed memory aside, so the tests that weigh the heap (leaks) stay out; those of Python alone
# (the others) have nothing for them to see.
UNSANITIZED = $(foreach name,core_leaks config recipe recipe_identity tols unread_variables,--ignore=tests/core/test_$(name).py)
SANITIZED = TE_CUDA=0 TE_SANITIZE=address,undefined
UBSAN_ENV = UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
ASAN_RUN = $(UBSAN_ENV) ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONSAFEPATH=1 \
	PYTHONPATH="$(CURDIR)/build/sanitize/lib" \
	LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libubsan.so)"

.PHONY: help environments demo demo-jax test test-all clients test-clients build lib test-gpu bench report lint format sanitize cuda-headers wheel-check clean
.DELETE_ON_ERROR:

# Build in place, and install the package, once and editable, where make made the environment.
define BUILD
@$(1) setup.py -q build_ext --inplace
@$(1) tools/editable_install.py
endef

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

environments: $(ENV)-lint $(ENV)-test ## set up what `make lint` and `make test` need

demo: $(ENV)-demo ## set up, build, train a small GPT in FP8 and in high precision
	$(call BUILD,$(DEMO_PY))
	PYTHONPATH=. $(DEMO_PY) examples/train_gpt.py $(ARGS)
	@$(DEMO_PY) tools/editable_install.py --say

demo-jax: $(ENV)-test ## set up, build, train a small GPT in JAX, in FP8 and in high precision
	$(call BUILD,$(TEST_PY))
	PYTHONPATH=. $(TEST_PY) examples/jax/train_gpt.py $(ARGS)
	@$(TEST_PY) tools/editable_install.py --say

test: $(ENV)-test ## set up, build, run the tests (TESTS=path, ARGS="-k name")
	$(call BUILD,$(TEST_PY))
	$(TEST_PY) -m pytest -q $(SPREAD) $(ARGS) $(TESTS)
	@$(TEST_PY) tools/editable_install.py --say

test-all: override ARGS += --nightly
test-all: test ## run the long sweeps too that `make test` leaves out, those of the mark nightly

clients: $(ENV)-clients ## set up and fetch what `make test-clients` needs
	@$(CLIENTS_PY) tools/fetch_clients.py $(CLIENT_TESTS)

test-clients: clients ## run released client packages on top of this one (CLIENT_TESTS=path, ARGS=...)
	@test -n "$(NO_BUILD)" || $(CLIENTS_PY) setup.py -q build_ext --inplace
	$(CLIENTS_PY) -m pytest -q $(SPREAD) $(ARGS) $(CLIENT_TESTS)

build: $(ENV)-demo ## build the extension in place (V=1 prints each command)
	$(call BUILD,$(DEMO_PY))

lib: $(ENV)-demo ## build build/libtransformer_engine.a and .so
	@$(DEMO_PY) setup.py -q library

test-gpu: $(ENV)-test ## run the tests that need a GPU (NO_BUILD=1: with the extension as it is)
	@test -n "$(NO_BUILD)" || $(TEST_PY) setup.py -q build_ext --inplace
	$(TEST_PY) -m pytest -q -m gpu $(ARGS) $(TESTS)

bench: $(ENV)-test ## run the benchmarks (ARGS="--json FOLDER/" keeps the figures; NO_BUILD=1 as above)
	@test -n "$(NO_BUILD)" || $(TEST_PY) setup.py -q build_ext --inplace
	for name in import_time dispatch host gemm kernels kernels_attention kernels_layer; do PYTHONPATH=. $(TEST_PY) benchmarks/$$name.py $(ARGS) || exit 1; done

report: $(ENV)-test ## print what a call of an operator costs (benchmarks/dispatch.py; no figure fails it)
	@test -n "$(NO_BUILD)" || $(TEST_PY) setup.py -q build_ext --inplace
	PYTHONPATH=. $(TEST_PY) benchmarks/dispatch.py --device cpu $(ARGS)

lint: $(ENV)-lint ## check style, spelling and the rules of the house (ARGS=--deep: the analyzer without our bound)
	$(LINT_PATH) ruff format --check .
	$(LINT_PATH) ruff check .
	$(LINT_PATH) clang-format --dry-run -Werror $(C_FILES)
	$(LINT_PATH) codespell
	! grep -rIlE '^(<{7}|>{7}) ' --exclude-dir=build --exclude-dir=.git --exclude-dir='.venv*' .  # of a merge
	$(LINT_PY) tools/check_cpy.py
	$(LINT_PY) tools/check_tests.py
	@$(LINT_PY) setup.py -q build_ext --inplace
	$(LINT_PY) tools/check_globals.py
	$(LINT_PY) tools/check_layers.py
	$(LINT_PY) tools/check_pyi.py
	$(LINT_PATH) $(LINT_PY) tools/tidy.py $(ARGS)
	@$(LINT_PY) tools/report_sizes.py

format: $(ENV)-lint ## format Python, C and CUDA C
	$(LINT_PATH) ruff format .
	$(LINT_PATH) ruff check --fix .
	$(LINT_PATH) clang-format -i $(C_FILES)

sanitize: $(ENV)-test ## run the C tests and SANITIZE_TESTS with the address and undefined-behaviour sanitizers (ARGS=--nightly: each case)
	rm -rf build/sanitize/lib
	@$(TEST_PY) setup.py -q build_ext --inplace  # the C tests import it from here
	@$(SANITIZED) $(TEST_PY) setup.py -q build --build-lib build/sanitize/lib
	$(SANITIZED) $(UBSAN_ENV) $(TEST_PY) -m pytest -q $(SPREAD) -m "not gpu" tests/c
	$(SANITIZED) $(ASAN_RUN) $(TEST_PY) -m pytest -q $(SPREAD) -p only_sanitized \
		-o pythonpath="build/sanitize/lib . tests tools" \
		$(UNSANITIZED) $(ARGS) $(SANITIZE_TESTS)

cuda-headers: build/cuda-headers/.stamp ## fetch the cuBLAS and cuDNN headers (900 MB pass by) to build against

wheel-check: $(ENV)-test ## install into build/wheel-check without a network and import the result from there
	rm -rf build/wheel-check
	$(TEST_PY) -m pip install -q --no-index --no-deps --no-build-isolation --target build/wheel-check .
	PYTHONSAFEPATH=1 PYTHONPATH=build/wheel-check $(TEST_PY) -c 'import transformer_engine._core as c; \
		print(c.__file__); assert "wheel-check" in c.__file__'

clean: ## delete what the build made
	rm -rf build transformer_engine/_core*.so transformer_engine/_core_names.pyi

# Both work in one environment.
$(ENV)-test: | $(ENV)-lint

# The clients' packages go on top of the test environment, which stays as light as it is.
$(ENV)-clients: $(ENV)-test
	@$(PYTHON) tools/environment.py clients $(TEST_PY) $@ \
		.venv-clients$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))

$(ENV)-%: tests/constraints.txt tools/environment.py
	@$(PYTHON) tools/environment.py $* $(PYTHON) $@

build/cuda-headers/.stamp: tools/fetch_cuda_headers.py
	$(PYTHON) tools/fetch_cuda_headers.py build/cuda-headers
	touch $@
