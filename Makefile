# Each target first installs what it needs into .venv.
PYTHON ?= python3
BIN := .venv/bin

SENTENCES := printf '%s\n' 'Ich bin müde.' 'Wo ist mein Buch?' 'Tom hat ein neues Auto.' 'Das ist nicht gut.'

.PHONY: demo test test-slow fuzz check format clean

demo: .venv/.package
	@rm -rf .demo
	@echo 'Four sentences by the bundled model, which this program trained on one GPU in three minutes:'
	@$(SENTENCES) | $(BIN)/transduce translate --scores --quiet
	@echo
	@echo 'Now a model of your own: trained on 40,000 short sentences, in three minutes, on this machine:'
	@$(BIN)/transduce train tatoeba-40k --out .demo/run --budget 170s
	@echo
	@$(SENTENCES) | $(BIN)/transduce translate .demo/run --scores --quiet
	@echo
	@$(SENTENCES) | $(BIN)/transduce inspect .demo/run --html .demo/inspect.html --quiet
	@echo 'Open .demo/inspect.html in a browser: it shows what every head of this model attends to.'
	@echo
	@echo 'In three minutes on a CPU, training reads each sentence once or twice, so the model has only begun to learn.'
	@echo 'With more time, more text or a GPU it becomes as good as the bundled model.'
	@echo
	@echo 'Next: $(BIN)/transduce train YOUR.de YOUR.en --out run          train on your own two files'
	@echo '      $(BIN)/transduce translate --json                         type a sentence: tokens and probabilities'
	@echo '      $(BIN)/transduce inspect "Das ist gut." --html out.html   see what every head attends to'
	@echo '      $(BIN)/pip install -e .[serve]; $(BIN)/transduce serve    a page that translates as you type, and an API'
	@echo '      $(BIN)/transduce evaluate run --source A --reference B    BLEU, chrF++ and TER with signatures'
	@echo '      $(BIN)/transduce prepare tatoeba-40k --out prepared --stats   statistics of a corpus'
	@echo '      $(BIN)/transduce check-paper                              compare each setting with the paper'

test: .venv/.dev
	$(BIN)/python -m pytest -m "not slow"

test-slow: .venv/.dev
	$(BIN)/python -m pytest -m slow

fuzz: .venv/.dev
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -m hypothesis

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv

.venv/.package: pyproject.toml constraints.txt
	@echo 'Setting up .venv (PyTorch is large: this takes a minute the first time)'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q -c constraints.txt -e .
	@touch $@

.venv/.dev: .venv/.package
	@echo 'Installing the packages for tests and checks into .venv'
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@
