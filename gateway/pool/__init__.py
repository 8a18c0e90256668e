"""Engine pods as the gateway sees them: finding them, talking to them, choosing one."""
