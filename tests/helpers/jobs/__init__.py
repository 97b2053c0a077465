"""Programs that tests start on several ranks."""
