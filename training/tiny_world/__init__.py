"""Trains the tiny world: its codec, its causal video model, and that model's distillation to four steps.

Run by scripts/train_tiny_world.py. Needs a ComfyUI checkout, since the model is ComfyUI's own CausalWanModel
and every number is measured through ComfyUI's own sampler.
"""
