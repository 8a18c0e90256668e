"""What models write: constraints and their grammars, tool calls and thinking sections."""
