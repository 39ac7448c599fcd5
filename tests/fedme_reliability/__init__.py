"""What `make reliability` tries: each part is a module listed in `frame.PARTS`, the same code that fast tests use in small."""
