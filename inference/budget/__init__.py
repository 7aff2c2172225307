"""How many draft tokens a step feeds, decided from what earlier steps took and gained."""
