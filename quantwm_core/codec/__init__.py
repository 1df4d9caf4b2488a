"""Functions on tensors from which methods are built; N is batch x heads, S tokens, D channels of a head."""
