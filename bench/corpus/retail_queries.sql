-- Questions to the retail star, as dashboards, analysts and public benchmarks ask them. Each has its shape in a comment.

-- a filter on the fact
SELECT count(*), sum(amount) FROM sales WHERE day = DATE '2023-03-15';
-- a range of dates
SELECT store_key, sum(amount) FROM sales WHERE day BETWEEN DATE '2023-11-20' AND DATE '2023-11-30' GROUP BY store_key;
-- a range of times
SELECT count(*) FROM sales WHERE sold_at >= TIMESTAMP '2024-02-01 00:00:00' AND sold_at < TIMESTAMP '2024-02-08 00:00:00';
-- a key
SELECT * FROM sales WHERE ticket = 4711;
-- a few keys
SELECT ticket, amount FROM sales WHERE ticket IN (17, 4711, 77777);
-- a customer's history
SELECT day, amount FROM sales WHERE customer_key = 19017 ORDER BY day DESC LIMIT 20;
-- a year of dates
SELECT month(day), sum(amount) FROM sales WHERE year(day) = 2022 GROUP BY 1;
-- extract
SELECT count(*) FROM sales WHERE extract(year FROM day) = 2024 AND extract(month FROM day) = 5;
-- date_trunc
SELECT sum(amount) FROM sales WHERE date_trunc('month', sold_at) = TIMESTAMP '2023-06-01 00:00:00';
-- date_trunc of a date
SELECT store_key, count(*) FROM sales WHERE date_trunc('quarter', day) = DATE '2022-04-01' GROUP BY store_key;
-- a cast to a date
SELECT count(*) FROM sales WHERE CAST(sold_at AS DATE) = DATE '2023-05-05';
-- strftime
SELECT sum(amount) FROM sales WHERE strftime(day, '%Y-%m') = '2023-09';
-- arithmetic with an interval
SELECT count(*) FROM sales WHERE day >= DATE '2023-07-01' - INTERVAL '7' DAY AND day < DATE '2023-07-01';
-- arithmetic on the column
SELECT count(*) FROM sales WHERE day + INTERVAL '30' DAY < DATE '2022-03-01';
-- an integer date key
SELECT sum(quantity) FROM sales WHERE day_key BETWEEN 20240101 AND 20240131;
-- integer division of a date key
SELECT count(*) FROM sales WHERE day_key // 100 = 202305;
-- coalesce
SELECT count(*) FROM sales WHERE coalesce(promotion_key, -1) = 42 AND day >= DATE '2024-10-01';
-- CASE as a filter
SELECT count(*) FROM sales WHERE CASE WHEN day < DATE '2022-02-01' THEN 'old' ELSE 'new' END = 'old';
-- a prefix
SELECT ticket FROM sales WHERE note LIKE 'Gift 77%';
-- lower
SELECT count(*) FROM sales WHERE lower(note) = 'gift 42';
-- a struct field
SELECT count(*) FROM sales WHERE delivery.zone = 17 AND delivery.country = 'JP';
-- OR on one table
SELECT count(*) FROM sales WHERE day = DATE '2022-05-05' OR day = DATE '2024-05-05' OR ticket = 5;
-- NOT
SELECT count(*) FROM sales WHERE NOT (day < DATE '2024-11-01') AND status <> 'paid';
-- the latest days
SELECT sum(amount) FROM sales WHERE day >= (SELECT max(day) FROM days WHERE is_holiday);
-- a star join by year and month
SELECT i.category, sum(s.amount) FROM sales s JOIN days d ON s.day_key = d.day_key JOIN items i ON s.item_key = i.item_key
WHERE d.year = 2023 AND d.month = 11 GROUP BY i.category ORDER BY 2 DESC;
-- a star join by brand
SELECT d.year, i.brand, sum(s.amount) AS total FROM days d, sales s, items i
WHERE d.day_key = s.day_key AND s.item_key = i.item_key AND i.brand = 'Brand 7' AND d.month = 12
GROUP BY d.year, i.brand ORDER BY d.year, total DESC, i.brand LIMIT 100;
-- a rare brand by its item keys
SELECT count(*) FROM sales JOIN items USING (item_key) WHERE brand = 'Brand 3' AND color = 'red' AND list_price > 150;
-- stores of a country
SELECT st.store_name, sum(s.amount) FROM sales s JOIN stores st ON s.store_key = st.store_key
WHERE st.country = 'PL' AND st.region = 'North' GROUP BY st.store_name;
-- customers by segment and country
SELECT c.segment, count(DISTINCT s.customer_key) FROM sales s JOIN customers c ON s.customer_key = c.customer_key
WHERE c.country = 'JP' AND c.birth_year < 1945 AND s.day >= DATE '2024-12-01' GROUP BY c.segment;
-- one customer by email
SELECT s.day, s.amount FROM sales s JOIN customers c ON s.customer_key = c.customer_key WHERE c.email = 'customer19001@example.com';
-- a customer by a function of the email
SELECT count(*) FROM sales s JOIN customers c ON s.customer_key = c.customer_key WHERE lower(c.email) = 'customer19001@example.com';
-- a dimension by LIKE
SELECT sum(s.amount) FROM sales s JOIN customers c ON s.customer_key = c.customer_key WHERE c.email LIKE '%19001@%';
-- items by a list of names
SELECT i.item_name, sum(quantity) FROM sales s JOIN items i USING (item_key)
WHERE i.item_name IN ('Item 2990', 'Item 2991') GROUP BY i.item_name;
-- holidays
SELECT d.day, count(*) FROM sales s JOIN days d ON s.day = d.day WHERE d.is_holiday GROUP BY d.day;
-- a join by the day of a timestamp
SELECT count(*) FROM sales s JOIN days d ON CAST(s.sold_at AS DATE) = d.day WHERE d.is_holiday AND d.year = 2023;
-- weekdays of a quarter
SELECT st.store_name, d.weekday, sum(s.amount) FROM sales s, stores st, days d
WHERE s.store_key = st.store_key AND s.day_key = d.day_key AND d.year = 2022 AND d.quarter = 3 AND st.is_outlet
GROUP BY ALL;
-- IN with a subquery
SELECT sum(amount) FROM sales WHERE store_key IN (SELECT store_key FROM stores WHERE country = 'SE' AND is_outlet);
-- EXISTS
SELECT count(*) FROM sales s WHERE EXISTS (SELECT 1 FROM days d WHERE d.day_key = s.day_key AND d.year_month = '2022-12');
-- NOT EXISTS
SELECT count(*) FROM sales s WHERE s.day = DATE '2022-08-08' AND NOT EXISTS (SELECT 1 FROM returns r WHERE r.ticket = s.ticket);
-- NOT IN
SELECT count(*) FROM sales WHERE day > DATE '2024-12-24' AND store_key NOT IN (SELECT store_key FROM stores WHERE is_outlet);
-- a scalar subquery as the value
SELECT count(*) FROM sales WHERE day_key = (SELECT max(day_key) FROM days);
-- two facts by the ticket
SELECT s.ticket, s.amount, r.reason FROM sales s JOIN returns r ON s.ticket = r.ticket
WHERE r.returned BETWEEN DATE '2023-04-01' AND DATE '2023-04-03';
-- two facts with a dimension
SELECT i.category, sum(r.amount) FROM returns r JOIN sales s ON r.ticket = s.ticket JOIN items i ON r.item_key = i.item_key
WHERE s.day BETWEEN DATE '2024-01-01' AND DATE '2024-01-15' GROUP BY i.category;
-- a left join with a filter on the left
SELECT s.ticket, r.reason FROM sales s LEFT JOIN returns r ON s.ticket = r.ticket WHERE s.day = DATE '2023-10-10';
-- a left join with a filter on the right
SELECT count(*) FROM sales s LEFT JOIN days d ON s.day_key = d.day_key WHERE d.year_month = '2024-06';
-- a full join
SELECT count(*) FROM (SELECT * FROM sales WHERE day = DATE '2024-03-03') s FULL JOIN (SELECT * FROM returns WHERE returned = DATE '2024-03-03') r
ON s.ticket = r.ticket;
-- a common table expression
WITH december AS (SELECT day_key FROM days WHERE year = 2023 AND month = 12)
SELECT count(*), sum(amount) FROM sales JOIN december USING (day_key);
-- two years side by side
WITH by_month AS (SELECT d.year, d.month, sum(s.amount) AS total FROM sales s JOIN days d USING (day_key) GROUP BY d.year, d.month)
SELECT a.month, a.total, b.total FROM by_month a JOIN by_month b ON a.month = b.month WHERE a.year = 2022 AND b.year = 2023 AND a.month = 2;
-- a filter above a grouping
SELECT * FROM (SELECT day, count(*) AS n FROM sales GROUP BY day) WHERE day >= DATE '2024-12-30';
-- HAVING on a key
SELECT store_key, sum(amount) FROM sales WHERE day >= DATE '2024-12-01' GROUP BY store_key HAVING store_key >= 40;
-- HAVING on a sum
SELECT customer_key, sum(amount) AS total FROM sales WHERE day_key >= 20241201 GROUP BY customer_key HAVING sum(amount) > 5000;
-- ROLLUP
SELECT i.category, st.country, sum(s.amount) FROM sales s, days d, items i, stores st
WHERE s.day_key = d.day_key AND s.item_key = i.item_key AND s.store_key = st.store_key AND d.year_month = '2022-07'
GROUP BY ROLLUP (i.category, st.country);
-- GROUPING SETS
SELECT status, store_key, count(*) FROM sales WHERE day = DATE '2022-01-31' GROUP BY GROUPING SETS ((status), (store_key), ());
-- a window in a filter
SELECT * FROM (SELECT day, store_key, amount, row_number() OVER (PARTITION BY store_key ORDER BY amount DESC, ticket) AS place
FROM sales WHERE day BETWEEN DATE '2023-01-01' AND DATE '2023-01-31') WHERE place <= 3;
-- a window filtered by its partition
SELECT * FROM (SELECT store_key, day, sum(amount) OVER (PARTITION BY store_key, day) AS total FROM sales) WHERE day = DATE '2022-09-09' AND store_key = 11;
-- QUALIFY
SELECT store_key, ticket, amount FROM sales WHERE day = DATE '2023-02-02'
QUALIFY row_number() OVER (PARTITION BY store_key ORDER BY amount DESC, ticket) = 1;
-- DISTINCT
SELECT DISTINCT c.country FROM sales s JOIN customers c USING (customer_key) WHERE s.day_key BETWEEN 20230601 AND 20230603;
-- UNION ALL of channels
SELECT 'sale' AS kind, sum(amount) FROM sales WHERE day = DATE '2024-07-07'
UNION ALL SELECT 'return', sum(amount) FROM returns WHERE returned = DATE '2024-07-07';
-- a filter above UNION ALL
SELECT kind, sum(amount) FROM (SELECT 'sale' AS kind, day, amount FROM sales UNION ALL SELECT 'return', returned, amount FROM returns) AS both_of
WHERE day BETWEEN DATE '2022-02-01' AND DATE '2022-02-14' GROUP BY kind;
-- INTERSECT
SELECT customer_key FROM sales WHERE day = DATE '2022-11-11' INTERSECT SELECT customer_key FROM sales WHERE day = DATE '2023-11-11';
-- EXCEPT
SELECT item_key FROM sales WHERE day_key = 20220601 EXCEPT SELECT item_key FROM sales WHERE day_key = 20220602;
-- counts of several hours in one query
SELECT * FROM (SELECT count(*) AS early FROM sales s JOIN stores st USING (store_key) WHERE st.city = 'City 7' AND s.day = DATE '2023-12-24' AND hour(s.sold_at) < 12) a,
(SELECT count(*) AS late FROM sales s JOIN stores st USING (store_key) WHERE st.city = 'City 7' AND s.day = DATE '2023-12-24' AND hour(s.sold_at) >= 12) b;
-- FILTER
SELECT sum(amount) FILTER (WHERE day_key BETWEEN 20240401 AND 20240430) AS april, sum(amount) FILTER (WHERE day_key BETWEEN 20240501 AND 20240531) AS may FROM sales;
-- sums of CASE
SELECT sum(CASE WHEN day = DATE '2024-04-01' THEN amount END), sum(CASE WHEN day = DATE '2024-04-02' THEN amount END) FROM sales;
-- sums of CASE by store
SELECT store_key, sum(CASE WHEN d.weekday = 'Sunday' THEN amount ELSE 0 END) AS sundays FROM sales s JOIN days d USING (day_key)
WHERE d.year = 2024 AND d.week = 20 GROUP BY store_key;
-- OR across two dimensions
SELECT count(*) FROM sales s JOIN customers c USING (customer_key) JOIN items i USING (item_key)
WHERE c.email = 'customer19900@example.com' OR i.item_name = 'Item 2998';
-- pairs of conditions on two dimensions
SELECT sum(s.quantity) FROM sales s, stores st, items i WHERE s.store_key = st.store_key AND s.item_key = i.item_key
AND ((st.city = 'City 20' AND i.brand = 'Brand 9') OR (st.city = 'City 21' AND i.brand = 'Brand 10')) AND s.day_key BETWEEN 20240201 AND 20240229;
-- customers above the average of their country
SELECT count(*) FROM sales s WHERE s.day = DATE '2022-10-01' AND s.amount > (SELECT avg(x.amount) FROM sales x WHERE x.store_key = s.store_key AND x.day = DATE '2022-10-01');
-- the price above the average of the item
SELECT count(*) FROM sales s JOIN items i USING (item_key) WHERE i.brand = 'Brand 55' AND s.quantity > (SELECT avg(x.quantity) FROM sales x WHERE x.item_key = i.item_key);
-- the latest sale of a customer
SELECT s.* FROM sales s JOIN (SELECT customer_key, max(sold_at) AS last FROM sales GROUP BY customer_key) l
ON s.customer_key = l.customer_key AND s.sold_at = l.last WHERE s.customer_key = 18888;
-- sales during promotions
SELECT p.medium, count(*) FROM sales s JOIN promotions p ON s.promotion_key = p.promotion_key WHERE p.medium = 'tv' AND s.day BETWEEN p.starts AND p.starts + INTERVAL '3' DAY GROUP BY p.medium;
-- a join by a range
SELECT p.promotion_key, count(*) FROM sales s JOIN promotions p ON s.day BETWEEN p.starts AND p.starts + INTERVAL '1' DAY WHERE p.promotion_key = 77 GROUP BY p.promotion_key;
-- VALUES
SELECT v.label, sum(s.amount) FROM sales s JOIN (VALUES (20230101, 'new year'), (20231225, 'christmas')) AS v (day_key, label) ON s.day_key = v.day_key GROUP BY v.label;
-- a row of values
SELECT count(*) FROM sales WHERE (store_key, day_key) IN ((1, 20240105), (2, 20240106));
-- contains
SELECT count(*) FROM sales WHERE list_contains([20230404, 20230405], day_key);
-- UNNEST of a list
SELECT count(*) FROM sales WHERE day_key IN (SELECT unnest([20230404, 20230405]));
-- a text as a date
SELECT count(*) FROM sales WHERE day = '2023-08-17';
-- a text as a time
SELECT count(*) FROM sales WHERE sold_at BETWEEN '2023-08-17 08:00:00' AND '2023-08-17 10:00:00';
-- a number of another type
SELECT count(*) FROM sales WHERE amount > 7700 AND price > 190.5;
-- a DOUBLE computed
SELECT count(*) FROM sales WHERE amount / quantity > 199.9 AND day_key > 20241224;
-- ORDER BY and LIMIT
SELECT ticket, amount FROM sales WHERE day_key = 20220315 ORDER BY amount DESC, ticket LIMIT 10;
-- the largest rows of all
SELECT ticket, amount FROM sales ORDER BY amount DESC, ticket LIMIT 10;
-- a whole table
SELECT status, count(*), sum(amount) FROM sales GROUP BY status;
-- no filter but a join
SELECT c.country, sum(s.amount) FROM sales s JOIN customers c USING (customer_key) GROUP BY c.country;
