"""What several tests share: models, data, oracles, launchers."""
