"""stub"""
def fold_product(left, right, votes): return False
