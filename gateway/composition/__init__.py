"""What the composition root needs: the settings, and parts that it creates together."""
