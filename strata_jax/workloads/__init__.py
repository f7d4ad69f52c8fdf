"""Request lists: traces, documents, synthetic generators, arrivals."""
