"""Saved models: loading, prediction, export, models for unseen clients."""
