"""Output of models: constraints and their grammars, tool calls and thinking sections."""
