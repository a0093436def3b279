# Each target sets up what it needs in .venv, from nothing.
PYTHON ?= python3
BIN := .venv/bin

SENTENCES := printf '%s\n' 'Ich bin müde.' 'Wo ist mein Buch?' 'Tom hat ein neues Auto.' 'Das ist nicht gut.'

.PHONY: demo test test-slow fuzz check format clean

demo: .venv/.package
	@rm -rf .demo
	@echo 'The translator that comes along, trained by this program in three minutes on one GPU:'
	@$(SENTENCES) | $(BIN)/transduce translate --scores --quiet
	@echo
	@echo 'One of your own, from 40,000 short sentences in three minutes on this machine:'
	@$(BIN)/transduce train tatoeba-40k --out .demo/run --budget 170s
	@echo
	@$(SENTENCES) | $(BIN)/transduce translate .demo/run --scores --quiet
	@echo
	@$(SENTENCES) | $(BIN)/transduce inspect .demo/run --html .demo/inspect.html --quiet
	@echo 'What each of its heads looked at meanwhile is in .demo/inspect.html: open it in a browser.'
	@echo
	@echo 'Three minutes on a CPU are a look or two at 38,000 short sentences: it has begun to learn.'
	@echo 'More time, more text or a GPU make of it what you saw first.'
	@echo
	@echo 'Next: $(BIN)/transduce train YOUR.de YOUR.en --out run          your own two files'
	@echo '      $(BIN)/transduce translate --json                         type a sentence: each token, its probability'
	@echo '      $(BIN)/transduce inspect "Das ist gut." --html out.html   what every head looks at'
	@echo '      $(BIN)/pip install -e .[serve]; $(BIN)/transduce serve     a page that translates as you type, and an API'
	@echo '      $(BIN)/transduce evaluate run --source A --reference B    BLEU, chrF++ and TER, with their signatures'
	@echo '      $(BIN)/transduce prepare tatoeba-40k --out prepared --stats   what is in the data'
	@echo '      $(BIN)/transduce check-paper                              each setting beside the paper'

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
	@echo 'Adding to .venv what tests and checks need'
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@
