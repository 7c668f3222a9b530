# The policy of the tests, and an example of one: groups of a department read its namespace, and salaries stay hidden.
package seamark

import rego.v1

default allow := false

allow if permitted(input.object)

# The positions of the allowed objects of a listing.
allowed contains position if {
	some position, object in input.objects
	permitted(object)
}

permitted(_) if input.principal.name == "root"

permitted(object) if {
	input.privileges == ["browse"]
	object.kind in {"warehouse", "namespace"}
}

permitted(object) if {
	every privilege in input.privileges {
		privilege in {"browse", "plan", "read"}
	}
	sprintf("oidc-group:%s", [object.namespace[0]]) in input.principal.groups
	not startswith(object.name, "salaries")
}
