"""The answers of `autopar explain`: plans and their analysis come in, texts and tables go out."""
