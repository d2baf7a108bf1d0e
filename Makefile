# Each target does all its own set-up; nothing is done twice when nothing changed.
PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Tests run on two cores, file by file: most of a test's time is one process. More that compute make timings unsteady;
# the third runs only what mostly waits (tests/workers.py).
WORKERS ?= 3
# Hundreds of tests start a process: with compiled modules on disk each of them starts a quarter of a second sooner.
export PYTHONDONTWRITEBYTECODE =

.PHONY: setup demo docs test test-codecs test-torch test-network test-ecosystem test-faults test-remote-faults test-soak test-world test-fuzz test-matrix test-last-second test-absurd test-attacks test-strangers test-remote bench clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("offbeat needs Python 3.11 or newer, this is %d.%d: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	@echo "setting up $(VENV) (torch and the tools; a minute or two, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

# Train the digits, then the same training with one slow learner under two strategies, side by side.
demo: setup
	@$(BIN)/offbeat train
	@echo
	@$(BIN)/python examples/slow_learner.py

# The documentation as a site in build/docs; a broken link is an error.
docs: setup
	@$(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[docs]'
	@$(BIN)/mkdocs build --strict --quiet
	@echo "open build/docs/index.html"

# mypy has a core for half a minute: it runs while the tests begin, and what it finds fails the target all the same.
test: setup
	@$(BIN)/ruff check --no-cache .
	@$(BIN)/ruff format --no-cache --check -q .
	@$(BIN)/mypy & types=$$!; $(BIN)/pytest -n $(WORKERS) --dist loadfile; tests=$$?; wait $$types && exit $$tests

# Every codec on 10,000 tensors and over 1,000 steps; every coded schedule on 2 to 8 ranks. Minutes.
test-codecs: setup
	@OFFBEAT_CODECS=1 $(BIN)/pytest tests/codecs tests/schedules/test_coded.py tests/collectives/test_coded_group.py

# PyTorch's own tests of torch.distributed, with Gloo and with this backend: the same must run and pass. Minutes.
test-torch: setup
	@cd tests && ../$(BIN)/python -m torch_suite.compare

# Groups across the hosts of a lab: every sum, bytes on sockets and interfaces, faults at 10 points each. Half an hour.
test-network: setup
	@$(BIN)/python benchmarks/network_check.py

# Programs of other people's shape, and of Lightning, Accelerate and Hugging Face: the same parameters as on Gloo. Minutes.
test-ecosystem: setup
	@$(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt \
		lightning==2.6.6 accelerate==1.15.0 transformers==5.22.0
	@OFFBEAT_ECOSYSTEM=1 $(BIN)/pytest -s tests/ecosystem tests/process/test_unedited_programs.py
	@$(BIN)/python benchmarks/programs_on_hosts.py

# Every fault that one host can suffer, 20 times each with other seeds and real time limits, and a table. Half an hour.
test-faults: setup
	@cd tests && OFFBEAT_REPEATS=$${OFFBEAT_REPEATS:-20} ../$(BIN)/python -m process.fault_table

# Every fault between hosts of a lab, 3 times each with other seeds, and a table. OFFBEAT_REPEATS=20 takes hours. Half an hour.
test-remote-faults: setup
	@cd tests && OFFBEAT_REPEATS=$${OFFBEAT_REPEATS:-3} ../$(BIN)/python -m process.remote_fault_table

# 20 minutes in which every 3 seconds a learner on another host is killed, cut off or stopped: nothing lost, nothing grows.
test-soak: setup
	@cd tests && ../$(BIN)/python -m process.soak

# Its state machines in 10,000 random worlds, and the seed at which each planted bug is found. Minutes.
test-world: setup
	@cd tests && ../$(BIN)/python -m server.world --seeds 10000 --planted

# Learners and servers that say what they like: 2,000,000 messages in random worlds, 100,000 against real processes. Minutes.
test-fuzz: setup
	@cd tests && ../$(BIN)/python -m server.fuzz --messages 2000000
	@cd tests && ../$(BIN)/python -m server.fuzz_processes --messages 100000

# Every strategy trains the digits, and the ledger of samples is checked; server strategies with a server on each of 3 hosts, too; then all that is too long for `make test`. Minutes.
test-matrix: setup
	@cd tests && ../$(BIN)/python -m train.matrix
	@cd tests && ../$(BIN)/python -m train.remote_matrix --place spread
	@OFFBEAT_MATRIX=1 $(BIN)/pytest tests/train tests/process tests/server tests/simulate/test_server.py tests/simulate/test_compare_networks.py tests/test_cli.py tests/collectives/test_odd_uses.py tests/collectives/test_across_hosts.py tests/collectives/test_keys_across_hosts.py tests/parallel

# A run is killed at 60 points over its last second, and resumed: the same bits. Minutes.
test-last-second: setup
	@$(BIN)/python benchmarks/last_second.py

# Every command is asked for absurd sizes and files: an answer in 10 s and 1 GB, in one line. Minutes.
test-absurd: setup
	@$(BIN)/python benchmarks/absurd_requests.py
	@$(BIN)/python benchmarks/absurd_requests.py --estimates

# 200 attacks on the stores of all-reduce groups by another user of this host; needs root. Minutes.
test-attacks: setup
	@$(BIN)/python benchmarks/store_attacks.py

# 1,000 strangers during a training on several hosts of a lab, and 100,000 mutated frames of a rank that has the key. Minutes.
test-strangers: setup
	@$(BIN)/python benchmarks/strangers.py
	@cd tests && ../$(BIN)/python -m collectives.frame_fuzz --frames 100000
	@cd tests && ../$(BIN)/python -m server.remote_fuzz --frames 1000000

# Learners on other hosts of a lab: every server strategy, a host that comes and goes 100 times, push, fetch and cancel at 1 Gbit/s, servers on 4 hosts. Half an hour.
test-remote: setup
	@cd tests && ../$(BIN)/python -m train.remote_matrix
	@cd tests && ../$(BIN)/python -m train.remote_matrix --comings 100
	@$(BIN)/python benchmarks/remote_server.py
	@$(BIN)/python benchmarks/remote_server.py --place spread
	@$(BIN)/python benchmarks/remote_server.py --against rpc,rpc-tuned,ray-tuned --rounds 3

bench: setup
	@$(BIN)/python benchmarks/schedules.py
	@echo
	@$(BIN)/python benchmarks/simulator.py
	@echo
	@$(BIN)/python benchmarks/virtual.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
