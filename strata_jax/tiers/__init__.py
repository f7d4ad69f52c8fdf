"""The tiers that hold KV pages: device pool, host pool, storage."""
