"""Conversations, chat templates, tokenised batches and benchmark questions. Loads no model."""
