"""``python -m yardstick_llm`` is the command ``yardstick``."""

from yardstick_llm.gateway.__main__ import yardstick

if __name__ == "__main__":
    yardstick()
