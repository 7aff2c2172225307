"""``drafters serve``: a web page that shows every step of decoding, and OpenAI's chat endpoint behind it."""
