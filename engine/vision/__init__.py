"""Models that read images: the tower that embeds them, and images in prompts, in the prefix cache and in steps."""
