"""Saved models in use: loading, predicting, exporting, serving unseen clients."""
