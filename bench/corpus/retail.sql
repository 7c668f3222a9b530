-- A retail star: sales and returns, and what they refer to. Skewed: few stores, items and customers have most sales.
-- Variables: customers, sales. `spread` is a number from 0 to n - 1 for a key, and `skewed` prefers the low ones.
CREATE MACRO spread(key, salt, n) AS CAST(hash(key * 64 + salt) % n AS BIGINT);
CREATE MACRO part(key, salt) AS spread(key, salt, 1000003) / 1000003.0;
CREATE MACRO skewed(key, salt, n) AS CAST(floor(n * part(key, salt) * part(key, salt) * part(key, salt)) AS BIGINT);

CREATE TABLE days AS
SELECT CAST(strftime(day, '%Y%m%d') AS INTEGER) AS day_key, day, CAST(year(day) AS INTEGER) AS year,
       CAST(quarter(day) AS INTEGER) AS quarter, CAST(month(day) AS INTEGER) AS month, strftime(day, '%Y-%m') AS year_month,
       CAST(weekofyear(day) AS INTEGER) AS week, dayname(day) AS weekday,
       strftime(day, '%m%d') IN ('0101', '0501', '1225', '1226') AS is_holiday
FROM (SELECT CAST(unnest(generate_series(DATE '2022-01-01', DATE '2024-12-31', INTERVAL 1 DAY)) AS DATE) AS day)
ORDER BY day_key;

CREATE TABLE stores AS
SELECT CAST(k AS INTEGER) AS store_key, 'Store ' || k AS store_name, 'City ' || (k % 24) AS city,
       ['FR', 'DE', 'IT', 'ES', 'PL', 'SE'][1 + k % 6] AS country, ['West', 'Centre', 'South', 'North'][1 + k % 4] AS region,
       DATE '2010-01-01' + CAST(spread(k, 1, 4000) AS INTEGER) AS opened, k % 10 = 9 AS is_outlet
FROM range(48) AS numbers(k);

CREATE TABLE items AS
SELECT CAST(k AS INTEGER) AS item_key, 'Item ' || k AS item_name, 'Brand ' || spread(k, 2, 60) AS brand,
       ['Books', 'Food', 'Garden', 'Home', 'Music', 'Shoes', 'Sport', 'Toys'][1 + k % 8] AS category,
       'Class ' || spread(k, 3, 30) AS class, ['red', 'green', 'blue', 'black', 'white'][1 + spread(k, 4, 5)] AS color,
       CAST(1 + spread(k, 5, 20000) / 100.0 AS DECIMAL(10, 2)) AS list_price
FROM range(3000) AS numbers(k);

CREATE TABLE customers AS
SELECT k AS customer_key, 'customer' || k || '@example.com' AS email, 'Name ' || spread(k, 6, 5000) AS last_name,
       ['FR', 'DE', 'IT', 'ES', 'PL', 'SE', 'US', 'JP'][1 + spread(k, 7, 8)] AS country,
       ['consumer', 'business', 'public'][1 + skewed(k, 8, 3)] AS segment,
       CAST(1940 + spread(k, 9, 66) AS INTEGER) AS birth_year, DATE '2018-01-01' + CAST(spread(k, 10, 2500) AS INTEGER) AS joined
FROM range(getvariable('customers')) AS numbers(k);

CREATE TABLE promotions AS
SELECT CAST(k AS INTEGER) AS promotion_key, ['mail', 'tv', 'event', 'web'][1 + k % 4] AS medium,
       DATE '2022-01-01' + CAST(spread(k, 11, 1050) AS INTEGER) AS starts, CAST(spread(k, 12, 40) AS INTEGER) AS percent
FROM range(100) AS numbers(k);

CREATE TABLE sales AS
SELECT k AS ticket, CAST(strftime(day, '%Y%m%d') AS INTEGER) AS day_key, day,
       CAST(day AS TIMESTAMP) + to_seconds(spread(k, 13, 86400)) AS sold_at, skewed(k, 14, getvariable('customers')) AS customer_key,
       CAST(skewed(k, 15, 3000) AS INTEGER) AS item_key, CAST(skewed(k, 16, 48) AS INTEGER) AS store_key,
       CASE WHEN spread(k, 17, 10) = 0 THEN CAST(spread(k, 18, 100) AS INTEGER) END AS promotion_key,
       CAST(1 + skewed(k, 19, 40) AS INTEGER) AS quantity, CAST(1 + spread(k, 20, 20000) / 100.0 AS DECIMAL(10, 2)) AS price,
       CAST((1 + skewed(k, 19, 40)) * (1 + spread(k, 20, 20000) / 100.0) AS DECIMAL(12, 2)) AS amount,
       ['paid', 'open', 'cancelled', 'disputed'][1 + skewed(k, 21, 4)] AS status,
       CASE WHEN spread(k, 22, 50) = 0 THEN 'Gift ' || spread(k, 23, 900) END AS note,
       {'country': ['FR', 'DE', 'IT', 'ES', 'PL', 'SE', 'US', 'JP'][1 + skewed(k, 24, 8)], 'zone': CAST(spread(k, 25, 90) AS INTEGER)} AS delivery
FROM (SELECT k, DATE '2022-01-01' + CAST(spread(k, 26, 1096) AS INTEGER) AS day FROM range(getvariable('sales')) AS numbers(k))
ORDER BY year(day), month(day), store_key, ticket;

CREATE TABLE returns AS
SELECT ticket, item_key, customer_key, day + CAST(1 + spread(ticket, 27, 30) AS INTEGER) AS returned, amount,
       ['broken', 'late', 'wrong', 'other'][1 + skewed(ticket, 28, 4)] AS reason
FROM sales WHERE spread(ticket, 29, 12) = 0
ORDER BY returned, ticket;
