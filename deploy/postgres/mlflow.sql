-- Run once, when the server's folder is made; the database of Prefect is made by the image.
CREATE DATABASE mlflow;
