"""Distil a feature-fed draft from a target: prompts, corpus, training, evaluation, card."""
