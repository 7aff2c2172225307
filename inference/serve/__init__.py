"""``drafters serve``: an OpenAI-compatible server on this project's own engine, with a web page.

May import `engine`, `registry` and `api`. FastAPI and uvicorn are imported when the command runs.
"""
