"""What a model makes of a text instead of continuing it; no torch, because the daemon reads it too."""
