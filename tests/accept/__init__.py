"""The acceptance set: recorded answers of llama.cpp that this build must give too.

`python -m tests.accept DIR` takes any folder with `models/`, `goldens/` and `vocabs/`, and looks at
what a file holds, never at what it is called.
"""
