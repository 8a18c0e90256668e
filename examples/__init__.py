"""Programs that use Yardstick. They are in the source checkout only."""
