"""Experiments: TOML files, their settings with defaults and help texts, and presets."""
