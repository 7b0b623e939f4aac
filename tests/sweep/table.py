def write_table(results, page):
    pass
