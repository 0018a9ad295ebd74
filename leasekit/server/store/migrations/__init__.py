"""How a store's tables came to be, step by step. Opening a store takes the steps that are missing."""
