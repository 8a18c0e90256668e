"""Request bodies to token ids, one file for each family of endpoints. Runs in text workers, without the HTTP framework."""
