"""What an experiment is: one strict TOML file, its settings with their defaults, and their help texts."""
