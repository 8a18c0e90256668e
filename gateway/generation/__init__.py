"""Generation: sends prompts to engines and turns deltas into pieces of text."""
