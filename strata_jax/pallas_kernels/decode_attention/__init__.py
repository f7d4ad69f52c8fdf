"""Attention of one new token a row over the KV of its pages."""
