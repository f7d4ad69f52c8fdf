"""Attention of short chunks of new tokens over the KV of their pages, which holds them too."""
