"""The two values everything is made of, a fine-tune's change and the target's votes, and what can be done with them."""
