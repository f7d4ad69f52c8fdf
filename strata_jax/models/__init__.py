"""Models of the Llama family as pure functions, their weights and their tokenizers."""
