"""A hundred queries on star schemas. Which of them read fewer files, and why do the others not?"""
