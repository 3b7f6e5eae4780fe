"""What every section is made of: strict models, schedules, merging of recipes."""
